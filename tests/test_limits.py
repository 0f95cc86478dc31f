"""How much memory the daemon may ask for, on hosts and in cgroups of both versions."""

import pytest

from kvtier.limits import check_budget, default_budget, memory_limit, smallest_limit
from kvtier.types import Code, KvtierError

GIB = 1 << 30


@pytest.fixture
def host(tmp_path):
    """Folders like /proc and /sys/fs/cgroup of a host with 64 GiB; call it to write a file below either."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal:       {64 << 20} kB\nMemFree:  1 kB\n")
    cgroups.mkdir()
    return proc, cgroups, write


def test_without_cgroups_the_host_is_the_limit(host):
    """A host without a cgroup file, or with no limit in it, gives all of its memory."""
    proc, cgroups, write = host
    assert memory_limit(proc, cgroups) == 64 * GIB
    write("proc/self/cgroup", "0::/a\n")
    write("cgroup/a/memory.max", "max\n")
    assert smallest_limit(proc, cgroups) == (64 * GIB, str(proc / "meminfo"))


def test_the_tightest_of_all_parents_wins(host):
    """In version 2 a limit of any cgroup above counts."""
    proc, cgroups, write = host
    write("proc/self/cgroup", "0::/a/b/c\n")
    write("cgroup/a/memory.max", f"{8 * GIB}\n")
    write("cgroup/a/b/c/memory.max", f"{16 * GIB}\n")
    assert smallest_limit(proc, cgroups) == (8 * GIB, str(cgroups / "a/memory.max"))


def test_version_1_is_read_and_its_no_limit_ignored(host):
    """Version 1 limits count; its huge number for none does not."""
    proc, cgroups, write = host
    write("proc/self/cgroup", "9:name=systemd:/x\n4:memory:/x\n0::/\n")
    write("cgroup/memory/x/memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")
    assert memory_limit(proc, cgroups) == 64 * GIB
    write("cgroup/memory/x/memory.limit_in_bytes", f"{2 * GIB}\n")
    assert memory_limit(proc, cgroups) == 2 * GIB


@pytest.mark.parametrize(
    ("line", "file"), [("0::/host/path", "memory.max"), ("4:memory:/host/path", "memory/memory.limit_in_bytes")]
)
def test_container_limit_is_at_the_root_of_what_it_sees(host, line, file):
    """Where the cgroup's path is the host's and not there, the root of the mount is asked."""
    proc, cgroups, write = host
    write("proc/self/cgroup", line + "\n")
    write(f"cgroup/{file}", f"{4 * GIB}\n")
    assert memory_limit(proc, cgroups) == 4 * GIB


def test_budget_over_nine_tenths_is_refused_by_name(host):
    """A budget that fits is returned; one too large names host.bytes, the limit and where it comes from."""
    proc, cgroups, write = host
    write("proc/self/cgroup", "0::/a\n")
    write("cgroup/a/memory.max", f"{10 * GIB}\n")
    assert check_budget(9 * GIB, proc, cgroups) == 9 * GIB
    assert check_budget(0, proc, cgroups) == 0
    for wrong in (9 * GIB + 1, -1):
        with pytest.raises(KvtierError) as caught:
            check_budget(wrong, proc, cgroups)
        assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, "host.bytes")
        for part in (str(10 * GIB), str(cgroups / "a/memory.max"), str(wrong)):
            assert part in caught.value.message


def test_a_budget_leaves_the_daemon_room_for_itself(host):
    """In a small limit a tenth is not enough: index and buffers would have the daemon killed under a full host."""
    proc, cgroups, write = host
    write("proc/self/cgroup", "0::/\n")
    write("cgroup/memory.max", f"{GIB}\n")
    assert check_budget(GIB - (128 << 20), proc, cgroups) == GIB - (128 << 20)
    with pytest.raises(KvtierError, match=r"host\.bytes"):
        check_budget(GIB - (128 << 20) + 1, proc, cgroups)
    write("cgroup/memory.max", f"{64 << 20}\n")
    assert check_budget(0, proc, cgroups) == 0
    with pytest.raises(KvtierError, match=r"host\.bytes"):
        check_budget(1, proc, cgroups)


def test_default_is_small(host):
    """Unconfigured: 1 GiB, or an eighth where memory is short."""
    proc, cgroups, write = host
    assert default_budget(proc, cgroups) == GIB
    write("proc/self/cgroup", "0::/\n")
    write("cgroup/memory.max", f"{2 * GIB}\n")
    assert default_budget(proc, cgroups) == GIB // 4


def test_this_machine_has_a_limit():
    """The real files are understood."""
    assert 0 < memory_limit() < 1 << 50
    assert check_budget(1) == 1
