"""The interpreter that runs kernels on the CPU sees what kernels do wrong."""

from __future__ import annotations

import numpy as np
import pytest

import ptx
import ptxmath
from kvtier import quant
from ptxparse import parse

HEAD = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry bad(
	.param .u64 bad_param_0
)
{
	.reg .pred %p<9>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	.shared .align 4 .b8 box[256];

	ld.param.u64 %rd1, [bad_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	shl.b32 %r2, %r1, 2;
	mov.u32 %r3, box;
	add.s32 %r4, %r3, %r2;
	xor.b32 %r5, %r4, 128;
"""
NEXT = "xor.b32 %r6, %r1, 1;\n mul.wide.u32 %rd4, %r6, 4;\n add.s64 %rd5, %rd1, %rd4;"
LOAD = "ld.global.u32 %r7, [%rd5];"
WRONG = {
    "a step too far": ("ld.global.u32 %r6, [%rd3+4];", "1 threads out of bounds"),
    "from one array into the next": ("ld.global.u32 %r6, [%rd3+512];", "out of bounds"),
    "crooked": ("ld.global.u32 %r6, [%rd3+2];", "misaligned"),
    "no state space": ("ld.u32 %r6, [%rd3];", "no state space"),
    "all write to one place": ("st.global.u32 [%rd1], %r1;", "two threads write one address"),
    "one reads what another writes": (f"st.global.u32 [%rd3], %r1;\n{NEXT}\n{LOAD}", "another thread wrote this"),
    "no barrier between": ("st.shared.u32 [%r4], %r1;\n ld.shared.u32 %r6, [%r5];", "another thread wrote this"),
    "a barrier that half misses": (
        "setp.gt.u32 %p1, %r1, 31;\n @%p1 bra $L_end;\n bar.sync 0;\n$L_end:\n ret;",
        "a barrier that 32 threads of the block miss",
    ),
    "a shuffle that half misses": (
        "setp.gt.u32 %p1, %r1, 15;\n @%p1 bra $L_end;\n shfl.sync.bfly.b32 %r6|%p2, %r1, 1, 31, -1;\n$L_end:\n ret;",
        "a part of a warp",
    ),
    "a contracted product": ("mov.f32 %f1, 0f3F8CCCCD;\n fma.rn.f32 %f1, %f1, %f1, %f1;", "contracted"),
}


def run(body: str) -> ptx.Memory:
    """Run a body with 64 threads on an array of 64 words."""
    memory = ptx.Memory(1 << 16)
    at = memory.put(np.arange(64, dtype=np.uint32))
    kernel = parse(HEAD + "mov.f32 %f1, 0f3F800000;\n" + body + "\n\tret;\n}\n")["bad"]
    ptx.Run(kernel, memory, [1], [64], [at]).go()
    return memory


@pytest.mark.parametrize("name", WRONG)
def test_planted_bugs_are_seen(name: str):
    """Each kind of wrong kernel stops with a sentence that says what it is."""
    body, sentence = WRONG[name]
    with pytest.raises(AssertionError, match=sentence):
        run(body)


def test_with_the_barrier_it_is_right():
    """The same exchange through shared memory with a barrier between runs, and gives what it should."""
    memory = run("st.shared.u32 [%r4], %r1;\n bar.sync 0;\n ld.shared.u32 %r6, [%r5];\n st.global.u32 [%rd3], %r6;")
    assert memory.bytes[4096 : 4096 + 256].view(np.uint32).tolist() == [n ^ 32 for n in range(64)]


def test_comparisons_with_nan_are_false_but_the_unordered_ones():
    """setp.ne of a NaN is false as PTX has it (numpy says true); setp.neu is true."""
    asks = (
        "mov.f32 %f2, 0f7FC00000;\n setp.{} .f32 %p1, %f2, %f1;\n selp.u32 %r6, 1, 0, %p1;\n st.global.u32 [%rd3], %r6;"
    )
    for name, said in (("ne", 0), ("neu", 1), ("lt", 0), ("geu", 1)):
        memory = run(asks.replace("{} ", name))
        assert memory.bytes[4096 : 4096 + 256].view(np.uint32).tolist() == [said] * 64


def test_unknown_instructions_are_not_passed_over():
    """What the interpreter does not know stops it."""
    with pytest.raises(NotImplementedError, match=r"popc"):
        run("popc.b32 %r6, %r1;")


def test_e4m3_agrees_with_the_codec_on_every_step():
    """Two ways of rounding to e4m3, written apart, agree on all codes, all ties and both neighbours of each."""
    steps = quant._of_e4m3(np.arange(127, dtype=np.uint8))
    points = np.concatenate([steps, (steps[1:] + steps[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(points, np.float32(way)) for way in (-np.inf, np.inf)]
    values = np.clip(np.concatenate([points, *near]), 0, 448).astype(np.float32)
    pairs = ptxmath.e4m3_pair(values, -values)
    assert np.array_equal(pairs & 0xFF, quant._e4m3(values))
    assert np.array_equal(pairs >> 8, quant._e4m3(-values))
