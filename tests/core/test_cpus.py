"""CPUs in an order whose parts are whole cores of one memory node."""

from pathlib import Path

from async_rl.core.machine import arranged


def system(root: Path, *, nodes: list[str], siblings: list[str]) -> Path:
    for number, text in enumerate(nodes):
        (root / "node" / f"node{number}").mkdir(parents=True)
        (root / "node" / f"node{number}" / "cpulist").write_text(text + "\n")
    for text in siblings:
        for cpu in text.split(","):
            topology = root / "cpu" / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(text + "\n")
    return root


def test_siblings_are_adjacent_and_nodes_follow_each_other(tmp_path: Path) -> None:
    # Two sockets of two cores with two hyperthreads each, as Linux numbers them.
    of_two_sockets = system(
        tmp_path, nodes=["0-1,4-5", "2-3,6-7"], siblings=["0,4", "1,5", "2,6", "3,7"]
    )
    cpus = arranged(range(8), of_two_sockets)
    assert cpus.cores == (0, 4, 1, 5, 2, 6, 3, 7)
    assert cpus.core_nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert cpus.threads_per_core == 2
    assert arranged([6, 0, 4], of_two_sockets).cores == (0, 4, 6)


def test_a_kernel_that_lists_nothing_has_one_node_and_no_hyperthreads(tmp_path: Path) -> None:
    cpus = arranged([3, 1], tmp_path)
    assert (cpus.cores, cpus.core_nodes, cpus.threads_per_core) == ((1, 3), (0, 0), 1)
