"""Traces come in from three formats, and what is wrong in one is named."""

import gzip
import io
import json
import zipfile

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizing.curve import hit_curve
from kvtier.sizing.traces import load_trace
from kvtier.types import KvtierError

PATHS = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [6], []]


def mooncake(paths=PATHS, block=512):
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": block * len(p) + 7,
            "output_length": 9,
            "hash_ids": p,
            "block_size": block,
        }
        for n, p in enumerate(paths)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def lookups(paths=PATHS):
    lines = [
        {"timestamp": 1e9 + n, "request_id": str(n), "model_name": "m", "chunk_size": 256, "seq_len": 256 * len(p) + 7,
         "dtypes": ["bfloat16"], "shapes": [[2, 32, 256, 1024]], "chunk_hashes": [hex(b) for b in p]}
        for n, p in enumerate(paths)
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def npz(paths=PATHS, **leave):
    nodes, parent, leaf = {}, [], []
    for path in paths:
        node = -1
        for b in path:
            if (node, b) not in nodes:
                nodes[node, b] = len(parent)
                parent.append(node)
            node = nodes[node, b]
        leaf.append(node)
    arrays = {
        "dpar": np.array([i - 1 - p for i, p in enumerate(parent)], np.int32), "leaf": np.array(leaf, np.int32),
        "inp": np.array([64 * len(p) + 7 for p in paths], np.int32), "out": np.array([9] * len(paths), np.int32),
        "dt_ms": np.array([0] + [1000] * (len(paths) - 1), np.int32), "bs": np.int32(64),
        "model": np.zeros(len(paths), np.int8),
    } | leave  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **{k: v for k, v in arrays.items() if v is not None})
    return out.getvalue()


@pytest.fixture
def files(tmp_path):
    """The same requests in every format."""
    (tmp_path / "mooncake.jsonl").write_text(mooncake())
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(mooncake().encode()))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "lookup_hashes_1.jsonl").write_text(lookups(PATHS[:2]))
    (tmp_path / "folder" / "lookup_hashes_2.jsonl").write_text(lookups(PATHS[2:]))
    (tmp_path / "plain.npz").write_bytes(npz())
    (tmp_path / "packed.npz.zst").write_bytes(zstandard.compress(npz()))
    return tmp_path


@pytest.mark.parametrize("name", ["mooncake.jsonl", "packed.jsonl.gz", "folder", "plain.npz", "packed.npz.zst"])
def test_every_format_gives_the_same_requests(files, name):
    """Three hits of two, three and no blocks, whatever the file is."""
    trace = load_trace([files / name])
    curve = hit_curve(trace)
    assert [len(trace.path(r)) for r in range(5)] == [3, 4, 3, 1, 0]
    assert (curve.references, curve.unique, curve.hits[-1]) == (11, 6, 5)
    assert trace.block_tokens == {"folder": 256}.get(name, 64 if "npz" in name else 512)
    assert trace.seconds == 4.0 if name != "folder" else trace.seconds > 0


def test_a_lookup_log_tells_bytes_a_token(files):
    """2 x 32 x 1024 bf16 elements a token are 128 KiB."""
    assert load_trace([files / "folder"]).token_bytes == 131072


def test_the_first_requests_can_be_taken_alone(files):
    """--limit reads no further."""
    assert len(load_trace([files / "mooncake.jsonl"], 2).leaf) == 2
    assert len(load_trace([files / "plain.npz"], 2).leaf) == 2


def test_equal_ids_under_different_parents_are_different_blocks(tmp_path):
    """A block is its whole prefix: [1, 2] and [3, 2] share nothing."""
    (tmp_path / "t.jsonl").write_text(mooncake([[1, 2], [3, 2]]))
    assert hit_curve(load_trace([tmp_path / "t.jsonl"])).hits[-1] == 0


def test_recorded_sessions_may_each_begin_their_own_time(tmp_path):
    """Recordings joined one after the other: the second session's first request comes at 0 again."""
    steps = np.array([0, 40_000, -40_000, 25_000][: len(PATHS)] + [0] * (len(PATHS) - 4), np.int32)
    (tmp_path / "t.npz").write_bytes(npz(dt_ms=steps))
    trace = load_trace([tmp_path / "t.npz"])
    assert list(trace.time_s[:4]) == [0, 40, 0, 25][: len(PATHS)]
    assert trace.seconds == 40


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=12))
def test_json_lines_and_npz_agree(tmp_path_factory, paths):
    """Any requests have the same curve from both."""
    folder = tmp_path_factory.mktemp("agree")
    (folder / "t.jsonl").write_text(mooncake(paths))
    (folder / "t.npz").write_bytes(npz(paths))
    one, two = hit_curve(load_trace([folder / "t.jsonl"])), hit_curve(load_trace([folder / "t.npz"]))
    assert list(one.hits) == list(two.hits)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "t.jsonl:1"),
        ("[]", "t.jsonl:1"),
        ('{"timestamp": 1}', "t.jsonl:1 hash_ids"),
        ('{"hash_ids": [1], "block_size": 0}', "t.jsonl:1 block_size"),
        ('{"hash_ids": [1], "block_size": 64}\n{"hash_ids": [1], "block_size": 32}', "t.jsonl:2 block_size"),
        ('{"hash_ids": [1], "input_length": -5}', "t.jsonl:1 input_length"),
        ('{"chunk_hashes": ["0x1"], "seq_len": 300}', "t.jsonl:1 chunk_size"),
        ('{"hash_ids": [[1]]}', "t.jsonl:1 hash_ids"),
        ('{"hash_ids": [1], "timestamp": "noon"}', "t.jsonl:1 timestamp"),
        ('{"hash_ids": [1], "timestamp": Infinity}', "t.jsonl:1 timestamp"),
        ('{"hash_ids": [1], "output_length": "long"}', "t.jsonl:1 output_length"),
        ('{"chunk_hashes": [1], "chunk_size": 8, "shapes": [["a"]], "dtypes": ["int8"]}', "t.jsonl:1 shapes"),
        ("", "trace"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, field):
    """File, line and field of what is wrong."""
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(KvtierError) as caught:
        load_trace([tmp_path / "t.jsonl"])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"no zip", "trace"),
        (npz(dpar=None), "t.npz dpar"),
        (npz(dpar=np.array([5], np.int32)), "t.npz dpar"),
        (npz(dpar=np.array([-5], np.int32)), "t.npz dpar"),
        (npz(leaf=np.array([0.5])), "leaf.npy"),
        (npz(leaf=np.array([99], np.int32)), "t.npz leaf"),
        (npz(leaf=np.array([-2], np.int32)), "t.npz leaf"),
        (npz(leaf=np.array([], np.int32)), "trace"),
        (npz(inp=np.array([], np.int32)), "t.npz inp"),
        (npz(inp=np.array([-1] * 99, np.int32)), "t.npz inp"),
        (npz(bs=np.array([0], np.int32)), "t.npz bs"),
    ],
)
def test_a_bad_archive_is_named(tmp_path, raw, field):
    """The array that is missing or of another kind."""
    (tmp_path / "t.npz").write_bytes(raw)
    with pytest.raises(KvtierError) as caught:
        load_trace([tmp_path / "t.npz"])
    assert caught.value.field == field


def test_a_file_that_is_not_there_is_named(tmp_path):
    """`trace` and the path."""
    with pytest.raises(KvtierError, match="gone"):
        load_trace([tmp_path / "gone.jsonl"])
    with pytest.raises(KvtierError, match="trace"):
        load_trace([tmp_path])


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.zst", "t.npz.zst"])
def test_packed_files_that_are_damaged_are_named(tmp_path, name):
    """What they should be, and which one it is."""
    (tmp_path / name).write_bytes(b"neither of them")
    with pytest.raises(KvtierError, match=rf"trace: expected \w+ data .*{name}"):
        load_trace([tmp_path / name])


def test_arrays_that_are_cut_are_named(tmp_path):
    """Within a header, or within a number."""
    for size in (20, -1):
        with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive, io.BytesIO() as out:
            np.save(out, np.array([0, 0], np.int32))
            archive.writestr("dpar.npy", out.getvalue()[:size])
        with pytest.raises(KvtierError, match=r"dpar\.npy: expected"):
            load_trace([tmp_path / "t.npz"])
