"""An emulated Xeon (Sapphire Rapids: AVX-512 with VNNI, BF16 and FP16, and AMX) for testing code on any x86-64 Linux.

Debian's Bochs interprets every instruction, so neither AVX-512 nor AMX hardware is needed; it gives right results
and no times. `python -m tools.xeon_emulator --help` lists the commands. Setting up needs root, apt and debootstrap.

Where it differs from a real machine (Bochs 3.0 under Debian's kernel):

* Bochs has no XFD, therefore Linux leaves AMX off. `guest/tiles.c`, a kernel module loaded before the program, turns
  the tile state on in XCR0, answers arch_prctl's permission requests as a kernel with AMX does, keeps the tiles of
  threads apart, and shows the amx flags in /proc/cpuinfo.
* TDPBSSD, TDPBSUD and TDPBUSD are computed as TDPBUUD: only the unsigned by unsigned product is right.
* Of EVEX instructions, an 8-bit displacement is doubled by VPINSRB from memory and counts 4 bytes for VDPBF16PS with a
  whole vector in memory, and VCVTNE2PS2BF16 converts its second source into both halves. No kernel here uses these;
  oneDNN's int4 decompression does (benchmarks/ipex_onednn.md).
* One CPU, about a hundred times slower than a real one: keep inputs tiny.
"""
