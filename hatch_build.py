"""The package's build: compile the library and put it into the wheel, or build a plain wheel where that cannot be.

Takes hatchling's build of a wheel, editable or not, and gives it the shared libraries, the manifest and a platform tag.
It refuses to fail: without a compiler the wheel is a pure one and says at run time why it has no library.
"""

import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `pagedkv.native.build` before a wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name what is to be shipped. An editable install finds it in the source tree."""
        sys.path.insert(0, self.root)
        try:
            from pagedkv.native.build import OUTPUT, build
        finally:
            sys.path.remove(self.root)
        manifest = build()
        for name, reason in manifest.reasons.items():
            self.app.display_warning(f"pagedkv: {name or 'no compiled library'}: {reason}")
        if version == "editable":
            return
        shipped = ["manifest.json", *(f"libpagedkv-{name}.so" for name in manifest.variants)]
        build_data["force_include"] |= {str(OUTPUT / name): f"pagedkv/native/lib/{name}" for name in shipped}
        if manifest.variants:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
