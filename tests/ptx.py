"""Runs PTX on numpy: one lane a thread of the whole grid, in lockstep. Every access is checked; sectors are counted.

It stops at: global accesses out of bounds or misaligned, two threads that touch one byte of which one writes, races in
shared memory between barriers, barriers and shuffles that a part of the threads misses, loads and stores without a
state space, opcodes it does not know. It models no timing and no weak memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptxmath import ARITHMETIC, PACKED, flushed, halves_of_e4m3
from ptxparse import Instruction, Kernel

POISON = 0xA5
NOBODY, MANY = -1, -2
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
Lanes = np.ndarray


class WrongError(AssertionError):
    """What the kernel did wrong, with the instruction."""


class Memory:
    """Global memory: arrays that lie apart from each other, so that a step too far is seen."""

    def __init__(self, size: int = 1 << 24) -> None:
        held = np.full(size + 4096, POISON, np.uint8)
        shift = -held.ctypes.data % 4096
        self.bytes = held[shift : shift + size]
        self.base = int(self.bytes.ctypes.data)  # real addresses: numpy can do the same work in the same place
        self.owner = np.zeros(size, np.int16)
        self._used = 4096
        self._count = 0

    def take(self, size: int, shift: int = 0) -> tuple[int, np.ndarray]:
        """Address and bytes of a new array; its address is 256-byte aligned plus `shift`."""
        at = -(-self._used // 256) * 256 + shift
        self._used = at + size + 256
        assert self._used <= len(self.bytes), "the test's memory is too small"
        self._count += 1
        self.owner[at : at + size] = self._count
        return self.base + at, self.bytes[at : at + size]

    def put(self, array: np.ndarray, shift: int = 0) -> int:
        """Address of a copy of an array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address, view = self.take(len(raw), shift)
        view[:] = raw
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address."""
        return self.bytes[address - self.base : address - self.base + size]


class Traffic:
    """What a launch moved: 32-byte sectors that warps asked for, and steps."""

    def __init__(self) -> None:
        self.sectors = 0
        self.steps = 0


class Run:
    """One launch. Registers are raw 64-bit words, one per thread of the grid."""

    def __init__(
        self, kernel: Kernel, memory: Memory, grid: Sequence[int], threads: Sequence[int], args: Sequence[int]
    ) -> None:
        assert len(args) == len(kernel.params), f"{len(args)} arguments for {len(kernel.params)} parameters"
        self.kernel, self.memory, self.traffic = kernel, memory, Traffic()
        grid, wide, block = [*grid, 1, 1][:3], threads[0], int(np.prod(threads))
        self.count = int(np.prod(grid)) * block
        lane = np.arange(self.count)
        self.cta, self.warp = lane // block, lane // block * (-(-block // 32)) + lane % block // 32
        x, y = self.cta % grid[0], self.cta // grid[0] % grid[1]
        one = np.ones(self.count, np.int64)
        self.special = {
            "%tid.x": lane % block % wide, "%tid.y": lane % block // wide, "%ntid.x": one * wide,
            "%ntid.y": one * (block // wide), "%ctaid.x": x, "%ctaid.y": y,
            "%nctaid.x": one * grid[0], "%nctaid.y": one * grid[1],
        }  # fmt: skip
        self.params = dict(zip(kernel.params, args, strict=True))
        self.registers: dict[str, np.ndarray] = {}
        self.predicates: dict[str, np.ndarray] = {}
        self.alive = np.ones(self.count, bool)
        self.readers = np.full(len(memory.bytes), NOBODY, np.int32)
        self.writers = np.full(len(memory.bytes), NOBODY, np.int32)
        ctas = int(self.cta[-1]) + 1
        self.shared = np.full((ctas, max(kernel.shared_bytes, 1)), POISON, np.uint8)
        self.shared_by = np.full((2, *self.shared.shape), NOBODY, np.int32)  # reader, writer since the last barrier
        self.block = block

    def go(self) -> Traffic:
        """Run to the end; the threads that are furthest behind go first."""
        pending = {0: np.arange(self.count)}
        waiting: dict[int, np.ndarray] = {}
        while pending or waiting:
            if not pending:
                pending, waiting = self._barrier(waiting), {}
            pc = min(pending)
            self._straight(pc, pending.pop(pc), pending, waiting)
        return self.traffic

    def _straight(self, pc: int, lanes: Lanes, pending: dict[int, Lanes], waiting: dict[int, Lanes]) -> None:
        """Run threads from one place until they branch, wait, end, or meet others."""
        while True:
            if pc in pending:
                lanes = np.sort(np.concatenate([lanes, pending.pop(pc)]))
            elif pending and min(pending) < pc:
                pending[pc] = lanes
                return
            code = self.kernel.body[pc]
            self.traffic.steps += 1
            doing, rest = self._guarded(code, lanes)
            name = code.op[0]
            if name in {"bra", "ret", "exit", "bar"}:
                if len(rest):
                    self._join(pending, pc + 1, rest)
                if len(doing):
                    self._control(code, pc, doing, pending, waiting)
                return
            if len(doing):
                try:
                    self._step(code, doing)
                except WrongError as exc:
                    raise WrongError(f"{exc}: {code.text}") from None
            pc += 1

    def _guarded(self, code: Instruction, lanes: Lanes) -> tuple[Lanes, Lanes]:
        """The threads that do an instruction and those that skip it."""
        if code.guard is None:
            return lanes, lanes[:0]
        does = self.predicates[code.guard[0]][lanes] == code.guard[1]
        return lanes[does], lanes[~does]

    @staticmethod
    def _join(pending: dict[int, Lanes], pc: int, lanes: Lanes) -> None:
        pending[pc] = np.sort(np.concatenate([pending[pc], lanes])) if pc in pending else lanes

    def _control(
        self, code: Instruction, pc: int, lanes: Lanes, pending: dict[int, Lanes], waiting: dict[int, Lanes]
    ) -> None:
        if code.op[0] == "bra":
            self._join(pending, self.kernel.labels[code.args[0]], lanes)
        elif code.op[0] == "bar":
            self._join(waiting, pc, lanes)
        else:
            self.alive[lanes] = False

    def _barrier(self, waiting: dict[int, Lanes]) -> dict[int, Lanes]:
        """All threads of a block are at one barrier: let them go on."""
        for pc, lanes in waiting.items():
            for cta in np.unique(self.cta[lanes]):
                here = int(np.count_nonzero(self.cta[lanes] == cta))
                if here != self.block:
                    raise WrongError(
                        f"a barrier that {self.block - here} threads of the block miss: {self.kernel.body[pc].text}"
                    )
                self.shared_by[:, cta] = NOBODY
        return {pc + 1: lanes for pc, lanes in waiting.items()}

    # Operands.

    def _raw(self, name: str, lanes: Lanes) -> np.ndarray:
        """An operand as raw 64-bit words."""
        if name in self.special:
            return self.special[name][lanes].astype(np.uint64)
        if name.startswith("%"):
            return self.registers[name][lanes]
        if name in self.kernel.shared:
            return np.full(len(lanes), self.kernel.shared[name], np.uint64)
        if name.startswith(("0f", "0F")):
            return np.full(len(lanes), int("0x" + name[2:], 0), np.uint64)
        return np.full(len(lanes), int(name.rstrip("U"), 0) & 0xFFFF_FFFF_FFFF_FFFF, np.uint64)

    def _get(self, name: str, kind: str, lanes: Lanes) -> np.ndarray:
        """An operand as numbers of a PTX type."""
        if kind == "pred":
            return self.predicates[name][lanes]
        size = SIZES[kind[1:]]
        raw = self._raw(name, lanes).astype(f"u{size}")
        return raw.view({"f": f"f{size}", "s": f"i{size}"}.get(kind[0], f"u{size}"))

    def _set(self, name: str, value: np.ndarray, lanes: Lanes) -> None:
        """Write a register."""
        if value.dtype == bool:
            self.predicates.setdefault(name, np.zeros(self.count, bool))[lanes] = value
            return
        raw = np.ascontiguousarray(value).view(f"u{value.itemsize}").astype(np.uint64)
        self.registers.setdefault(name, np.zeros(self.count, np.uint64))[lanes] = raw

    def _step(self, code: Instruction, lanes: Lanes) -> None:
        """One instruction that is not control flow."""
        name, kind = code.op[0], code.op[-1]
        if name in {"ld", "st"}:
            self._access(code, lanes)
        elif name == "shfl":
            self._shuffle(code, lanes)
        elif name == "cvt":
            self._convert(code, lanes)
        elif name == "mov" and "{" in code.text:
            self._split(code, lanes)
        elif name in {"mov", "cvta"}:
            self._set(code.args[0], self._get(code.args[1], f"b{kind[1:]}", lanes), lanes)
        elif name in ARITHMETIC:
            self._set(code.args[0], self._arithmetic(code, lanes), lanes)
        else:
            raise NotImplementedError(code.text)

    def _split(self, code: Instruction, lanes: Lanes) -> None:
        """A register as two of half its size, or the reverse."""
        to, source = ([part.strip() for part in arg.strip("{}").split(",")] for arg in code.args)
        half = SIZES[code.op[1][1:]] * 4
        if len(to) == 2:
            raw = self._raw(source[0], lanes)
            self._set(to[0], raw.astype(f"u{half // 8}"), lanes)
            self._set(to[1], (raw >> np.uint64(half)).astype(f"u{half // 8}"), lanes)
        else:
            low, high = (self._raw(name, lanes) & np.uint64((1 << half) - 1) for name in source)
            self._set(to[0], low | high << np.uint64(half), lanes)

    def _arithmetic(self, code: Instruction, lanes: Lanes) -> np.ndarray:
        name, kind, ftz = code.op[0], code.op[-1], "ftz" in code.op
        if name == "selp":
            a, b = (self._get(arg, kind, lanes) for arg in code.args[1:3])
            return np.where(self.predicates[code.args[3]][lanes], a, b)
        kinds = [kind] * (len(code.args) - 1)
        if name in {"shl", "shr"}:
            kinds[1] = "u32"
        if "wide" in code.op and name == "mad":
            kinds[2] = f"{kind[0]}64"
        values = [self._get(arg, k, lanes) for arg, k in zip(code.args[1:], kinds, strict=True)]
        if ftz:
            values = [flushed(value) for value in values]
        with np.errstate(all="ignore"):
            result = ARITHMETIC[name](code, *values)
        return flushed(result) if ftz and result.dtype == np.float32 else result

    # Conversions.

    def _convert(self, code: Instruction, lanes: Lanes) -> None:
        to, source = code.op[-2:]
        if source == "e4m3x2":
            self._set(code.args[0], halves_of_e4m3(self._get(code.args[1], "b16", lanes)), lanes)
            return
        if to in PACKED:
            high, low = (self._get(arg, "f32", lanes) for arg in code.args[1:])
            self._set(code.args[0], PACKED[to](low, high), lanes)
            return
        value = self._get(code.args[1], source, lanes)
        if source == "f32" and to == "u32":
            assert "rni" in code.op, code.text
            with np.errstate(invalid="ignore"):
                value = np.clip(np.nan_to_num(np.rint(value.astype(np.float64))), 0, 0xFFFF_FFFF)
        kind = np.dtype({"f": "f", "s": "i"}.get(to[0], "u") + str(SIZES[to[1:]]))
        self._set(code.args[0], value.astype(kind), lanes)

    # Memory.

    def _access(self, code: Instruction, lanes: Lanes) -> None:
        """A load or store of one register or a vector."""
        space, kind = code.op[1], code.op[-1]
        load = code.op[0] == "ld"
        where, what = code.args[1 if load else 0], code.args[0 if load else 1]
        names = [part.strip() for part in what.strip("{}").split(",")]
        size = SIZES[kind[1:]]
        if space == "param":
            value = self.params[where.strip("[]")]
            self._set(what, np.full(len(lanes), value & 0xFFFF_FFFF_FFFF_FFFF, np.uint64).astype(f"u{size}"), lanes)
            return
        base, _, offset = where.strip("[]").partition("+")
        at = self._raw(base.strip(), lanes).astype(np.int64) + int(offset or 0)
        if space not in {"global", "shared"}:
            raise WrongError("no state space")
        if np.any(at % (size * len(names))):
            raise WrongError("misaligned")
        touch: Callable[..., np.ndarray] = self._global if space == "global" else self._shared
        data = None
        if not load:
            columns = [self._get(name, f"b{kind[1:]}", lanes) for name in names]
            data = np.stack(columns, axis=1).view(np.uint8).reshape(len(lanes), -1)
        out = touch(at, size * len(names), data, lanes)
        if load:
            columns = np.ascontiguousarray(out).view(f"u{size}").reshape(len(lanes), -1)
            for number, name in enumerate(names):
                self._set(name, np.ascontiguousarray(columns[:, number]), lanes)

    def _global(self, at: np.ndarray, size: int, data: np.ndarray | None, lanes: Lanes) -> np.ndarray:
        at = at - self.memory.base
        if np.any((at < 0) | (at + size > len(self.memory.bytes))):
            raise WrongError(
                f"{np.count_nonzero((at < 0) | (at + size > len(self.memory.bytes)))} threads out of bounds"
            )
        first, last = self.memory.owner[at], self.memory.owner[at + size - 1]
        if np.any((first == 0) | (first != last)):
            raise WrongError(f"{np.count_nonzero((first == 0) | (first != last))} threads out of bounds")
        self.traffic.sectors += len(np.unique(self.warp[lanes].astype(np.int64) << 40 | at >> 5))
        cells = at[:, None] + np.arange(size)
        _note(self.readers, self.writers, cells, lanes, data is not None)
        if data is not None:
            self.memory.bytes[cells] = data
            return data
        return self.memory.bytes[cells]

    def _shared(self, at: np.ndarray, size: int, data: np.ndarray | None, lanes: Lanes) -> np.ndarray:
        width = self.shared.shape[1]
        if np.any((at < 0) | (at + size > width)):
            raise WrongError("out of bounds in shared memory")
        cells = (self.cta[lanes] * width + at)[:, None] + np.arange(size)
        flat = self.shared.reshape(-1)
        _note(self.shared_by[0].reshape(-1), self.shared_by[1].reshape(-1), cells, lanes, data is not None)
        if data is not None:
            flat[cells] = data
            return data
        return flat[cells]

    def _shuffle(self, code: Instruction, lanes: Lanes) -> None:
        assert code.op[:3] == ("shfl", "sync", "bfly"), code.text
        whole = np.bincount(self.warp[lanes], minlength=1)
        if np.any((whole != 0) & (whole != 32)) or np.any(self._raw(code.args[4], lanes) & 0xFFFF_FFFF != 0xFFFF_FFFF):
            raise WrongError("a shuffle by a part of a warp")
        value = self._raw(code.args[1], lanes).reshape(-1, 32)
        by = self._raw(code.args[2], lanes).reshape(-1, 32).astype(np.int64)
        partner = np.arange(32)[None, :] ^ by
        names = code.args[0].split("|")
        self._set(names[0], np.take_along_axis(value, partner, 1).reshape(-1).astype(np.uint32), lanes)
        if len(names) > 1:
            self._set(names[1], np.ones(len(lanes), bool), lanes)


def _note(readers: np.ndarray, writers: np.ndarray, cells: np.ndarray, lanes: Lanes, write: bool) -> None:
    """Remember who touched which byte; raise where two threads did and one of them writes."""
    who = np.broadcast_to(lanes[:, None], cells.shape)
    wrote, read = writers[cells], readers[cells]
    if np.any((wrote != NOBODY) & (wrote != who)):
        raise WrongError("a race: another thread wrote this")
    if not write:
        readers[cells] = np.where((read == NOBODY) | (read == who), who, MANY)
        again = readers[cells] != who  # several threads of one instruction
        readers[cells[again]] = MANY
        return
    if np.any((read != NOBODY) & (read != who)):
        raise WrongError("a race: another thread read this")
    writers[cells] = who
    if np.any(writers[cells] != who):
        raise WrongError("a race: two threads write one address")
