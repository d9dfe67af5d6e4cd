"""The build: what is compiled when, and that nothing but a reason is left where it cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedkv.native import build as build_module
from pagedkv.native.build import Manifest, build, source_files, sources_digest
from pagedkv.native.variants import VARIANTS
from tests.native.fake_compiler import FakeCompiler

if TYPE_CHECKING:
    from pathlib import Path

X86 = [variant.name for variant in VARIANTS if variant.machine == "x86_64"]
NUM_SOURCES = len([path for path in source_files() if path.suffix == ".cpp"])


def test_every_variant_gets_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is compiled with each variant's flags and linked into its library; the manifest says so."""
    compiler = FakeCompiler(tmp_path / "bin")
    monkeypatch.setenv("CXX", compiler.command)
    manifest = build(output=tmp_path / "lib", machine="x86_64")

    assert X86 == list(manifest.variants)
    assert {} == manifest.reasons
    assert "fake 1.0" == manifest.compiler
    assert manifest == Manifest.load(tmp_path / "lib")
    assert {f"libpagedkv-{name}.so" for name in X86} | {"manifest.json"} == {
        p.name for p in (tmp_path / "lib").iterdir()
    }
    for variant in (variant for variant in VARIANTS if variant.machine == "x86_64"):
        (link,) = [call.split() for call in compiler.calls if call.endswith(f"/{variant.file_name}.new")]
        objects = [part for part in link if part.endswith(".o")]
        assert NUM_SOURCES == len(objects)
        for target in objects:
            (compiled,) = [
                call.split() for call in compiler.calls if call.endswith(f" -c {source_of(call)} -o {target}")
            ]
            flags = next(v.flags for v in VARIANTS if target.rpartition("/")[2].startswith(f"{v.name}-"))
            assert set(flags) <= set(compiled)
            assert target.rpartition("/")[2].startswith((f"{variant.name}-", f"{variant.like}-"))


def source_of(call: str) -> str:
    """Return the source file that a command compiles."""
    return next((part for part in call.split() if part.endswith(".cpp")), "")


def test_sources_that_read_the_same_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant like another has objects of its own only from sources that name what sets it apart."""
    for name, content in (("one.cpp", ""), ("two.cpp", "#ifdef __AVX512BF16__"), ("three.h", "")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(build_module, "SOURCE_FOLDERS", (tmp_path,))
    compiler = FakeCompiler(tmp_path / "bin")
    monkeypatch.setenv("CXX", compiler.command)
    build(output=tmp_path / "lib", machine="x86_64")
    own = [call.rpartition("/")[2] for call in compiler.calls if "/x86-64-v4-bf16-" in call.rpartition(" -o ")[2]]

    assert ["x86-64-v4-bf16-two.o"] == own


def test_what_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second build calls no compiler; a lost file brings back its own variant, other sources or ``force`` all."""
    compiler = FakeCompiler(tmp_path / "bin")
    monkeypatch.setenv("CXX", compiler.command)
    output = tmp_path / "lib"
    first = build(output=output, machine="x86_64")
    everything = len(compiler.calls)
    counts = []
    for lost in (None, X86[2]):
        if lost is not None:
            (output / f"libpagedkv-{lost}.so").unlink()
        assert first == build(output=output, machine="x86_64")
        counts.append(len(compiler.calls) - everything)
    build(output=output, machine="x86_64", force=True)
    counts.append(len(compiler.calls) - everything)
    monkeypatch.setattr(build_module, "LINK_FLAGS", ("-shared", "-other"))
    assert first.sources != build(output=output, machine="x86_64").sources
    counts.append(len(compiler.calls) - everything)

    assert [0, NUM_SOURCES + 1, NUM_SOURCES + 1 + everything, NUM_SOURCES + 1 + 2 * everything] == counts


def test_one_variant_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building by name adds to what the same sources have given before."""
    monkeypatch.setenv("CXX", FakeCompiler(tmp_path / "bin").command)
    build(output=tmp_path, machine="x86_64", only=(X86[2],))

    assert X86[1:] == list(build(output=tmp_path, machine="x86_64", only=(X86[1],)).variants)


def test_a_flag_the_compiler_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that does not compile is left out with the compiler's words; the others are built."""
    monkeypatch.setenv("CXX", FakeCompiler(tmp_path / "bin", refuses="-mavx512bf16").command)
    manifest = build(output=tmp_path / "lib", machine="x86_64")

    assert ["x86-64-v4", "x86-64-v3"] == list(manifest.variants)
    assert ["x86-64-v4-bf16"] == list(manifest.reasons)
    assert "no such flag" in manifest.reasons["x86-64-v4-bf16"]


@pytest.mark.parametrize("asked", ["no-such-compiler", None])
def test_no_compiler_leaves_a_reason(asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the build ends well with a manifest that says so; one that appears later is used."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if asked is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", asked)
    manifest = build(output=tmp_path / "lib", machine="x86_64")

    assert () == manifest.variants
    assert (
        f"no C++ compiler was found when pagedkv was built (tried {asked or 'g++, c++, clang++'})"
        == manifest.reasons[""]
    )
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CXX", FakeCompiler(tmp_path / "bin").command)
    assert (X86, {}) == (list((later := build(output=tmp_path / "lib", machine="x86_64")).variants), later.reasons)


def test_a_machine_without_a_variant(tmp_path: Path) -> None:
    """An architecture that the library has no build for gets a reason, not an error."""
    assert {"": "the library has no build for riscv64"} == build(output=tmp_path, machine="riscv64").reasons


def test_digest_follows_every_byte_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another content or another name of a source or header is another digest; other files do not count."""
    monkeypatch.setattr(build_module, "SOURCE_FOLDERS", (tmp_path,))
    digests = {sources_digest()}
    for name, content in (("a.cpp", "1"), ("a.cpp", "2"), ("b.h", "2"), ("c.py", "3")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        digests.add(sources_digest())

    assert 4 == len(digests)


@pytest.mark.parametrize("content", ["", "[]", '{"sources": "x"}', "\x00"])
def test_a_damaged_manifest_counts_as_none(content: str, tmp_path: Path) -> None:
    """What cannot be read is built anew, not trusted."""
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8")

    assert Manifest.load(tmp_path) is None
