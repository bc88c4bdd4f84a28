"""Runs the kernels for AMX tiles as instructions, on a machine that is emulated, and compares bits.

    python scripts/emulated_amx.py --bochs DIR --kernel vmlinuz       # some minutes

A Linux of its own boots on Bochs's Sapphire Rapids and runs ``tests/tiles_instructions.c`` as its only process: Linux
grants tiles and keeps them where threads change, and Bochs computes what instructions do, by code that is not ours.
There many rows are compared with few, and attention's scores with those of floats. Then all results are compared with
those of this processor, where it has AVX512_BF16: its own vectors, and tiles of ``tests/tiles_emulated.h``.

DIR is Bochs's source (bochs-emu/Bochs 783b58f, after 3.0) with ``tests/bochs_amx.patch``: a register that Linux needs
to grant tiles, and two mistakes mended that this processor's results showed. It was built there with
``--enable-cpu-level=6 --enable-x86-64 --enable-avx --enable-evex --enable-amx --with-nogui``. Linux is one from 5.16 on
with a serial console built in, such as Debian's. Needs gcc, xorriso and isolinux.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PROGRAM: Final = ROOT / "tests" / "tiles_instructions.c"
FLAGS: Final = (
    *"-std=gnu11 -O2 -ffp-contract=fast -Wno-psabi -static".split(),
    *"-ffunction-sections -fdata-sections -Wl,--gc-sections".split(),  # what calls Python is left out
    f"-I{sysconfig.get_paths()['include']}",
    f"-I{PROGRAM.parent}",
)
MACHINE: Final = """
cpu: model=sapphire_rapids, count=1, ips=50000000, ignore_bad_msrs=1
memory: guest=512, host=512
romimage: file={bochs}/bios/BIOS-bochs-latest, options=fastboot
vgaromimage: file={bochs}/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0-master: type=cdrom, path={room}/boot.iso, status=inserted
boot: cdrom
display_library: nogui
com1: enabled=1, mode=file, dev={room}/serial.txt
log: {room}/bochs.txt
panic: action=fatal
"""
WITHOUT: Final = "no5lvl nofsgsbase nopku nopti mitigations=off clearcpuid=rdpid,fsrm,erms"  # none of it is asked here
START: Final = """
default linux
label linux
  kernel linux
  append initrd=initrd console=ttyS0 quiet {without} -- {products} {seed}
"""


def compiled(room: Path, name: str, *more: str) -> Path:
    subprocess.run(["gcc", *FLAGS, *more, PROGRAM, "-o", room / name, "-lm", "-lpthread"], check=True)
    return room / name


def archive(program: bytes) -> bytes:
    """A file system in memory (cpio) whose /init is the program, with a console."""
    found = b""
    for name, mode, data, device in (
        ("dev", 0o040755, b"", (0, 0)),
        ("dev/console", 0o020600, b"", (5, 1)),
        ("init", 0o100755, program, (0, 0)),
        ("TRAILER!!!", 0, b"", (0, 0)),
    ):
        fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        for part in (b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0", data):
            found += part + bytes(-len(part) % 4)
    return found


def booted(room: Path, bochs: Path, kernel: Path, isolinux: list[Path], products: int, seed: int) -> list[str]:
    """The lines that the program writes on the emulated machine."""
    disc = room / "disc"
    disc.mkdir()
    shutil.copy(kernel, disc / "linux")
    for file in isolinux:
        shutil.copy(file, disc)
    (disc / "initrd").write_bytes(archive(compiled(room, "there").read_bytes()))
    (disc / "isolinux.cfg").write_text(START.format(without=WITHOUT, products=products, seed=seed))
    boot = "-b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table".split()
    subprocess.run(["xorriso", "-as", "mkisofs", "-quiet", "-o", room / "boot.iso", *boot, disc], check=True)
    (room / "machine").write_text(MACHINE.format(bochs=bochs, room=room))
    # It ends with an error of its own when the machine is switched off.
    subprocess.run([bochs / "bochs", "-q", "-f", room / "machine"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return (room / "serial.txt").read_text(errors="replace").splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bochs", type=Path, required=True)
    parser.add_argument("--kernel", type=Path, required=True)
    parser.add_argument("--isolinux", type=Path, nargs=2, metavar=("isolinux.bin", "ldlinux.c32"))
    parser.add_argument("--products", type=int, default=900)
    parser.add_argument("--seed", type=int, default=25)
    asked = parser.parse_args()
    usual = [Path("/usr/lib/ISOLINUX/isolinux.bin"), Path("/usr/lib/syslinux/modules/bios/ldlinux.c32")]
    with tempfile.TemporaryDirectory() as made:
        room, numbers = Path(made), (asked.products, asked.seed)
        there = booted(room, asked.bochs.resolve(), asked.kernel, asked.isolinux or usual, *numbers)
        here = compiled(room, "here", "-DTILES_EMULATED_HERE")
        ours = subprocess.run([here, *map(str, numbers)], capture_output=True, text=True).stdout.splitlines()
    flags = next((line.split() for line in there if line.startswith("flags")), [])
    print("Linux sees:", *(flag for flag in flags if "amx" in flag or flag == "avx512_bf16"))
    said = [line for line in there if " products, " in line or ": differ " in line or "not on this machine" in line]
    print(*(line for line in said if ": differ " not in line or ": differ 0 " not in line), sep="\n")
    apart = [pair for pair in zip(said, ours, strict=False) if pair[0] != pair[1]]
    if any("not on this machine" in line for line in ours):
        print("This processor has no AVX512_BF16: nothing to compare with.")
        apart = []
    else:
        print(f"{min(len(said), len(ours)) - len(apart)} of {len(ours)} lines are those of this processor.")
    for pair in apart[:10]:
        print(*pair, sep="\n  ")
    complete = len(said) == 2 * asked.products + 2 and all("differ 0 " in line or " in 0" in line for line in said)
    return 0 if complete and not apart else 1


if __name__ == "__main__":
    sys.exit(main())
