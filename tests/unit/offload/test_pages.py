"""Pages: rows come back as they went, copies are few, forks share until written, budgets hold."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.offload import host_memory
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier, available_memory, check_host_budget
from megakv.offload.link import EmulatedLink
from megakv.offload.paged_rows import PagedRows
from megakv.offload.pages import PagePool

WIDTH = 5
PAGE = 7 * WIDTH * 4


def make_pool(host_pages: int, disk_pages: int = 0, folder: Path | None = None) -> PagePool:
    tiers: list = [HostTier(host_pages * PAGE)]
    if folder is not None:
        tiers.append(DiskTier(disk_pages * PAGE, folder))
    return PagePool(tiers, PAGE)


def write(link: EmulatedLink, paged: PagedRows, rows: Tensor) -> None:
    link.start("out", paged.append(rows))


def read(link: EmulatedLink, paged: PagedRows, first: int, count: int) -> Tensor:
    target = torch.empty(count, paged.width)
    link.start("in", paged.moves(first, target)).wait()
    return target


def test_a_freed_page_is_written_to_when_it_was_read() -> None:
    """Reads are queued behind others; its next user's rows go another way, which is free."""
    pool, link = make_pool(2), EmulatedLink(bytes_s=PAGE / 0.3)
    rows = torch.randn(2, 7, WIDTH)
    first, second = (PagedRows(pool, WIDTH, torch.float32) for _ in range(2))
    for paged, each in zip((first, second), rows, strict=True):
        write(link, paged, each)
    targets = torch.empty(2, 7, WIDTH)
    for paged, target in zip((first, second), targets, strict=True):
        transfer = link.start("in", paged.moves(0, target))
    second.truncate(0)
    sent = link.start("out", PagedRows(pool, WIDTH, torch.float32).append(torch.randn(7, WIDTH)))
    for each in (sent, transfer):
        each.settle()
    assert torch.equal(targets, rows)
    link.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_equal_plain_tensors(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    pool, link = make_pool(9, 200, tmp_path), EmulatedLink()
    torch.manual_seed(seed)
    held = [(PagedRows(pool, WIDTH, torch.float32), torch.empty(0, WIDTH))]
    for _ in range(120):
        index = generator.randrange(len(held))
        paged, expected = held[index]
        action = generator.choice(["write", "write", "fork", "truncate", "drop"])
        if action == "write":
            rows = torch.randn(generator.randrange(0, 20), WIDTH)
            write(link, paged, rows)
            held[index] = paged, torch.cat([expected, rows])
        elif action == "fork" and len(held) < 5:
            held.append((paged.fork(), expected))
        elif action == "truncate":
            length = generator.randrange(0, len(expected) + 1)
            paged.truncate(length)
            held[index] = paged, expected[:length]
        elif action == "drop" and len(held) > 1:
            held.pop(index)
        paged, expected = generator.choice(held)
        first = generator.randrange(0, len(expected) + 1)
        count = generator.randrange(0, len(expected) - first + 1)
        assert torch.equal(read(link, paged, first, count), expected[first : first + count])
    held.clear()
    del paged
    assert pool.used() == {"host": 0, "disk": 0}
    link.close()


def test_layers_share_host_memory(tmp_path: Path) -> None:
    pool = PagePool([HostTier(5 * PAGE), DiskTier(6 * PAGE, tmp_path)], PAGE, layers=3)
    layers = [PagedRows(pool, WIDTH, torch.float32, layer=layer) for layer in range(3)]
    for paged in layers:
        paged.extend(3 * 7)
    assert [paged.in_memory() for paged in layers] == [14, 14, 7]
    assert pool.used() == {"host": 5 * PAGE, "disk": 4 * PAGE}
    layers[0].truncate(7)
    # Another layer has its share already; once the disk is full, it takes what is left.
    layers[1].extend(2 * 7)
    assert pool.used() == {"host": 4 * PAGE, "disk": 5 * PAGE}
    layers[1].extend(2 * 7)
    assert pool.used() == {"host": 5 * PAGE, "disk": 6 * PAGE}
    assert pool.free_bytes() == 0


def test_a_prompt_moves_in_one_copy() -> None:
    pool = make_pool(40)
    paged = PagedRows(pool, WIDTH, torch.float32)
    paged.extend(100)
    moves = paged.moves(3, torch.empty(90, WIDTH))
    assert len(moves) == 1 and moves[0].nbytes == 90 * WIDTH * 4
    assert len(moves[0].places) == 14


@pytest.mark.parametrize(("pin_bytes", "copies"), [(1 << 30, 1), (4 * PAGE + 3, 4), (2, 15)])
def test_no_copy_goes_across_a_seam(pin_bytes: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(100)
    monkeypatch.setattr(host_memory, "PIN_BYTES", pin_bytes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tier = HostTier(40 * PAGE, pin=True, unit=PAGE)
    paged, link, rows = PagedRows(PagePool([tier], PAGE), WIDTH, torch.float32), EmulatedLink(), torch.randn(100, WIDTH)
    moves = paged.append(rows)
    assert len(moves) == copies
    link.start("out", moves)
    assert torch.equal(read(link, paged, 0, 100), rows)
    link.close()
    tier.close()


def test_budgets_that_are_used_up_change_nothing() -> None:
    pool, link = make_pool(3), EmulatedLink()
    paged = PagedRows(pool, WIDTH, torch.float32)
    rows = torch.randn(20, WIDTH)
    write(link, paged, rows)
    with pytest.raises(MegaKVError, match=r"host_gb holds 420 B, all of it is in use"):
        paged.extend(2)
    assert paged.length == 20 and torch.equal(read(link, paged, 0, 20), rows)
    assert paged.extend(1) == 20
    link.close()


def test_pages_smaller_than_a_row_are_refused() -> None:
    with pytest.raises(MegaKVError, match="page_kib = 0 is too small.*160 B"):
        PagedRows(make_pool(3), 40, torch.float32)


def test_budgets_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    free = available_memory()
    assert free is not None and free > 0
    with pytest.raises(ValueError, match=r"host_gb asks for .* GiB of host memory, .* are free"):
        HostTier(2 * free)
    with pytest.raises(ValueError, match=r"disk_gb asks for .* GiB in .*, where .* are free"):
        DiskTier(1 << 60, tmp_path)
    with pytest.raises(ValueError, match=r"disk_path = .*missing.* cannot be written to: No such file"):
        DiskTier(100, tmp_path / "missing")


def test_ranks_of_a_host_share_its_memory() -> None:
    check_host_budget(3 << 30, 12 << 30, ranks=4)
    with pytest.raises(ValueError, match=r"host_gb asks for 4.00 GiB of host memory on each of 4 ranks.*12.00 GiB are"):
        check_host_budget(4 << 30, 12 << 30, ranks=4)


def write_group(folder: Path, names: tuple[str, str], limit: str, used: int, inactive: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, f"{used}\n", f"file 30\n{inactive} 500"), strict=True):
        (folder / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_limit_memory(version: int, tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemFree: 2 kB\nMemAvailable: 40 kB\nHugePages_Total: 0\n")
    assert available_memory(tmp_path) == 40 << 10
    line, root, names, inactive = {
        1: ("4:memory:/jobs/mine", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file"),
        2: ("0::/jobs/mine", "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"),
    }[version]  # fmt: skip
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/other\n8:cpu,cpuacct:/\n{line}\n")
    write_group(tmp_path / root / "other", names, "10", 5, inactive)
    assert available_memory(tmp_path) == 40 << 10
    # Without a limit; in the group itself; in the one around it; and at the top, as a container sees its own.
    write_group(tmp_path / root / "jobs/mine", names, "max", 7000, inactive)
    assert available_memory(tmp_path) == 40 << 10
    write_group(tmp_path / root / "jobs/mine", names, "9000\n", 7000, inactive)
    assert available_memory(tmp_path) == 2500
    write_group(tmp_path / root / "jobs", names, "9000", 7700, inactive)
    assert available_memory(tmp_path) == 1800
    write_group(tmp_path / root, names, "9000", 8100, inactive)
    assert available_memory(tmp_path) == 1400


def test_host_memory_is_there_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> int:
        return sum(int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
                   if line.startswith("Anonymous:")) << 10  # fmt: skip

    monkeypatch.setattr(host_memory, "PIECE_BYTES", 3 << 20)
    size, before = (40 << 20) + 12345, held()
    tier = HostTier(size)
    assert held() - before >= 0.99 * size
    tier.close()
    # What others take in the midst of it is noticed before the rest is asked for, and all is given back.
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 64 << 10)
    left = iter([size, size, 5 << 20])
    with pytest.raises(ValueError, match=r"host_gb asks for .* MiB of host memory, 5.00 MiB are free"):
        HostTier(size, free=lambda: next(left))
    assert held() - before < 0.2 * size


class Driver:
    """In the place of CUDA's: locks some pieces of memory and refuses all others."""

    def __init__(self, pieces: int):
        self.locked: dict[int, int] = {}
        self.error = 0
        self._pieces = pieces

    def forget(self) -> None:
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.locked) == self._pieces:
            self.error = 2
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.mark.parametrize(("pieces", "locked"), [(0, "0 B"), (1, "1000 B"), (3, None)])
def test_memory_that_cannot_be_locked_is_used_all_the_same(
    pieces: int, locked: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(pieces)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(host_memory, "_forget_error", driver.forget)
    monkeypatch.setattr(host_memory, "PIN_BYTES", 1000)
    tier = HostTier(2600, pin=True)
    assert not driver.error
    # Copies keep within a piece, and within what is locked.
    assert tier.seam == 1000
    # Every byte once, and none beyond the budget.
    assert list(driver.locked.values()) == [1000, 1000, 600][:pieces]
    warned = f"pinning host memory failed after {locked} of 2.54 KiB (error 2): copies"
    assert (warned in caplog.text and "ulimit -l" in caplog.text) == (locked is not None)
    rows, found = torch.randn(130, 5), torch.empty(130, 5)
    tier.rows(0, 130, 5, torch.float32).copy_(rows)
    found.copy_(tier.rows(0, 130, 5, torch.float32))
    assert torch.equal(found, rows)
    tier.close()
    assert not driver.locked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_files_keep_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    tier = DiskTier(10000, tmp_path)
    rows = torch.randn(6, 3).to(dtype)
    tier.rows(123 * dtype.itemsize, 6, 3, dtype).write_from(rows)
    found = torch.empty_like(rows)
    tier.rows(123 * dtype.itemsize, 6, 3, dtype).read_into(found)
    assert torch.equal(found, rows)
    assert not list(tmp_path.iterdir()), "the file has no name"
    tier.close()
