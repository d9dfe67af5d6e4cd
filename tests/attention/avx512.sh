#!/usr/bin/env bash
# Run the self-test of the builds with AVX-512 on an emulated processor, in a small Linux; not part of `make test`. It
# takes three minutes a build with bochs 3.0, nine with 2.7.
#
# Needs the Debian packages bochs, bochsbios, busybox-static, cpio, isolinux, syslinux-common and xorriso.
# The kernel is fetched with `apt-get download`, or is the image that KERNEL names.
#
# Debian 12's bochs (2.7) has AVX-512 without bf16, so it runs x86-64-v4 alone. BOCHS may name a newer one, which runs
# x86-64-v4-bf16 too: Debian 13's, or its source after
#   ./configure --enable-x86-64 --enable-cpu-level=6 --enable-avx --enable-evex --enable-pci \
#       --enable-all-optimizations --with-rfb --disable-docbook && make
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
bochs=${BOCHS:-bochs}

variants=(x86-64-v4)
model=corei7_skylake_x
if "$bochs" --help cpu 2>&1 < /dev/null | grep -qx sapphire_rapids; then
    variants+=(x86-64-v4-bf16)
    model=sapphire_rapids
fi

if [[ -z ${KERNEL:-} ]]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" { print $2; exit }')
    (cd "$folder" && apt-get -q download "$package" && dpkg-deb --fsys-tarfile ./*.deb |
        tar -x --wildcards './boot/vmlinuz*')
    KERNEL=$(echo "$folder"/boot/vmlinuz*)
fi

# The root folder: the self-test linked with each library, what these need, and a shell as init.
root=$folder/root
mkdir -p "$root/proc"
${PYTHON:-python3} -m pagedkv.native.build "${variants[@]/#/--variant=}" --output "$folder/lib"
for variant in "${variants[@]}"; do
    mkdir "$root/$variant"
    cp "$folder/lib/libpagedkv-$variant.so" "$root/$variant/"
    ${CXX:-g++} -std=c++20 -O2 -static-libstdc++ -static-libgcc -Ipagedkv/attention/cpu -Ipagedkv/native \
        tests/attention/selftest.cpp -L"$root/$variant" "-l:libpagedkv-$variant.so" '-Wl,-rpath,$ORIGIN' \
        -Wl,--no-as-needed -lgomp -o "$root/$variant/selftest"
    ldd "$root/$variant/selftest" | grep -oE '\s/(usr/)?lib\S*' | xargs -I{} cp -L --parents {} "$root"
done
cp /bin/busybox "$root/"
cat > "$root/init" << 'EOF'
#!/busybox sh
/busybox mount -t proc proc /proc
/busybox grep -m 1 'model name' /proc/cpuinfo
status=0
for test in /*/selftest; do
    OMP_WAIT_POLICY=passive $test || { status=$?; /busybox dmesg | /busybox tail -n 2; }
done
echo "exit status $status"
/busybox sleep 1  # until the serial port has sent that
/busybox poweroff -f
EOF
chmod +x "$root/init"

# A CD that boots it, without what bochs's processors tell the kernel wrongly: fsrm (short moves by string instructions,
# which the kernel gets wrong where the long ones are switched off), the compact states of xsaves and xsavec, and, where
# ACPI enters system management mode, five levels of page tables.
mkdir -p "$folder/cd/isolinux"
(cd "$root" && find . | cpio --quiet -o -H newc) > "$folder/cd/initrd"
cp "$KERNEL" "$folder/cd/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$folder/cd/isolinux/"
cat > "$folder/cd/isolinux/isolinux.cfg" << 'EOF'
default linux
label linux
kernel /vmlinuz
initrd /initrd
append console=ttyS0,115200 quiet clearcpuid=fsrm,xsaves,xsavec no5lvl nokaslr mitigations=off
EOF
xorriso -as mkisofs -quiet -o "$folder/cd.iso" -b isolinux/isolinux.bin -no-emul-boot -boot-load-size 4 \
    -boot-info-table "$folder/cd"

# rfb is a display without a screen, to which nobody has to connect. Messages are ignored, for bochs can hang when its
# clock interrupts one with another.
cat > "$folder/bochsrc" << EOF
display_library: rfb, options="timeout=0"
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=$model, ips=100000000
memory: guest=512, host=512
ata0-master: type=cdrom, path=$folder/cd.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$folder/serial
log: $folder/log
info: action=ignore
error: action=ignore
panic: action=fatal
EOF
# A bochs with a debugger waits for the command to continue. The exit status is not that of the test.
timeout -k 10 3600 "$bochs" -q -f "$folder/bochsrc" <<< c > "$folder/screen" 2>&1 || true
if ! grep -aq '^exit status' "$folder/serial"; then tail -n 3 "$folder/screen"; fi
tr -d '\r' < "$folder/serial"
grep -aq '^exit status 0' "$folder/serial"
