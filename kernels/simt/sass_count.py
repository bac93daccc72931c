#!/usr/bin/env python3
"""Counts machine instructions per KV byte in the loops of the compiled attend kernels.

Usage: sass_count.py FILE... [--limit N]

FILE is anything nvcc wrote that holds cubins: an object file, an executable, a cubin. Per
tensor-core attend kernel and architecture, the loop over tiles of the INT8 body is the innermost
loop with integer matrix instructions; it is found from the backward branches, so that neither
cuobjdump nor nvdisasm is needed. A warp's tile is 16 entries: 16 * 2 * head_dim bytes of keys and
values over 32 lanes. Every instruction of the loop counts, also those of the branch that is taken
only when a maximum moves. Exits with 1 where a loop needs more than the limit (default 5), or where
none is found.
"""
import argparse
import collections
import re
import struct
import sys

# Instructions are 16 bytes (sm_70 and later); the low 12 bits name the operation. Bits 9 to 11 say
# where operands come from, so arithmetic is told by the low 9 bits alone.
BRANCH, EXIT = 0x947, 0x94D
IMMA, HMMA = 0x037, 0x03C
NAMES = {0x037: "IMMA", 0x03C: "HMMA", 0x016: "PRMT", 0x030: "HADD2", 0x012: "LOP3",
         0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA", 0x024: "IMAD", 0x025: "IMAD.WIDE",
         0x010: "IADD3", 0x00C: "ISETP", 0x009: "FMNMX", 0x03E: "F2FP", 0x045: "I2FP"}
MEMORY = {0x981: "LDG", 0x986: "STG", 0x983: "LDL", 0x387: "STL", 0x308: "MUFU", 0xF89: "SHFL"}
ELF_MAGIC = b"\x7fELF"
CUDA_MACHINE = 190


def cubins(data):
    """Yields (architecture, sections) of every CUDA ELF image in the bytes."""
    for found in re.finditer(re.escape(ELF_MAGIC), data):
        image = data[found.start():]
        if len(image) < 64 or struct.unpack_from("<H", image, 18)[0] != CUDA_MACHINE:
            continue
        flags, = struct.unpack_from("<I", image, 0x30)
        architecture = flags & 0xFF if (flags & 0xFF) >= 50 else flags >> 8 & 0xFF
        yield architecture, sections(image)


def sections(image):
    table, = struct.unpack_from("<Q", image, 0x28)
    count, names = struct.unpack_from("<HH", image, 0x3C)
    rows = [struct.unpack_from("<IIQQQQIIQQ", image, table + 64 * i) for i in range(count)]
    for row in rows:
        start = rows[names][4] + row[0]
        name = image[start:image.index(b"\0", start)].decode()
        yield name, image[row[4]:row[4] + row[5]]


def loops(code, architecture):
    """(first, last) of every backward branch, and the operations of all instructions."""
    pairs = [struct.unpack_from("<QQ", code, i) for i in range(0, len(code) - 15, 16)]
    operations = [low & 0xFFF for low, _ in pairs]
    found = []
    for i, (low, high) in enumerate(pairs):
        if operations[i] != BRANCH:
            continue
        offset = ((high << 64 | low) >> 34) & ((1 << 48) - 1)
        if offset >> 47:
            offset -= 1 << 48
        # From sm_90 on the low eight bits of the distance stand apart.
        distance = 4 * offset if architecture < 90 else 4 * ((offset << 8) | (low >> 16 & 0xFF))
        target = i + 1 + distance // 16
        if 0 <= target < i:
            found.append((target, i))
    return found, operations


def body_loop(code, architecture):
    """The operations of the innermost loop with integer matrix instructions, or None."""
    found, operations = loops(code, architecture)
    holding = [(a, b) for a, b in found
               if any(op & 0x1FF == IMMA for op in operations[a:b + 1])]
    if not holding:
        return None
    first, last = min(holding, key=lambda span: span[1] - span[0])
    return operations[first:last + 1]


def name_of(operation):
    return MEMORY.get(operation) or NAMES.get(operation & 0x1FF) or "other"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--limit", type=float, default=5.0)
    options = parser.parse_args()
    worst, seen = 0.0, 0
    for path in options.files:
        with open(path, "rb") as file:
            data = file.read()
        for architecture, parts in cubins(data):
            for name, code in parts:
                kernel = re.fullmatch(r"\.text\..*attend_mma_kernelILi(\d+)E.*", name)
                operations = body_loop(code, architecture) if kernel else None
                if operations is None:
                    continue
                head_dim = int(kernel.group(1))
                per_byte = len(operations) / (16 * 2 * head_dim / 32)
                counts = collections.Counter(map(name_of, operations))
                print(f"sm_{architecture} head_dim {head_dim}: {len(operations)} instructions a "
                      f"tile, {per_byte:.2f} per KV byte; "
                      + ", ".join(f"{k} {v}" for k, v in counts.most_common(9)))
                worst, seen = max(worst, per_byte), seen + 1
    if seen == 0:
        print("no attend_mma kernel with a loop was found")
    return 0 if seen > 0 and worst <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
