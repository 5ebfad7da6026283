"""Costs of collectives, by hand; topologies that do not add up."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.simulate.network import (
    Exchange,
    Link,
    Network,
    list_presets,
    load_network,
    load_preset,
)


def network(**changed) -> Network:
    given = {
        "gpus_per_node": 2,
        "cards_per_node": 2,
        "near": Link(100.0, 1.0),
        "far": Link(10.0, 5.0),
        "pcie": Link(50.0, 2.0),
        "per_peer_us": 1.0,
    }
    return Network("by hand", **(given | changed))


def exchange(ranks: int, near: float, far: float) -> Exchange:
    return Exchange(*(np.full(ranks, size) for size in (near, far, near, far)))


def test_all_to_all_is_the_slower_way_plus_latency_and_peers():
    seconds = network().time_all_to_all(exchange(4, 1e9, 1e9))
    # far: 1 GB at 10 GB/s = 0.1 s against 0.01 s near; latency 5 us; 3 peers at 1 us
    np.testing.assert_allclose(seconds, 0.1 + 5e-6 + 3e-6)
    np.testing.assert_allclose(network().time_all_to_all(exchange(2, 1e9, 0)), 0.01 + 1e-6 + 1e-6)


def test_what_comes_in_counts_like_what_goes_out():
    moved = Exchange(np.zeros(4), np.zeros(4), np.zeros(4), np.array([1e9, 0, 0, 0]))
    np.testing.assert_allclose(
        network(per_peer_us=0.0).time_all_to_all(moved), [0.1 + 5e-6, 5e-6, 5e-6, 5e-6]
    )


def test_cards_are_shared_by_the_gpus_of_a_node():
    slow = network(cards_per_node=1).time_all_to_all(exchange(4, 0, 1e9))
    np.testing.assert_allclose(slow, 0.2 + 5e-6 + 3e-6)


def test_incast_takes_bandwidth_from_the_second_sender_on():
    two, many = (
        network(incast=0.5, per_peer_us=0.0).time_all_to_all(exchange(ranks, 0, 1e9))[0]
        for ranks in (4, 10)
    )
    np.testing.assert_allclose(two, 0.1 + 5e-6)  # one other node
    np.testing.assert_allclose(many, 0.1 / (1 - 0.5 * 3 / 4) + 5e-6)  # four others


def test_hostwire_crosses_pcie():
    inside = network(per_peer_us=0.0).time_all_to_all(exchange(2, 1e9, 0), "hostwire")
    np.testing.assert_allclose(inside, 1 / 50 + 4e-6 + 2 * (1 << 20) / 50e9)
    with pytest.raises(ValueError, match="pigeon"):
        network().time_all_to_all(exchange(2, 1, 1), "pigeon")


def test_all_gather_and_all_reduce():
    # 4 ranks in 2 nodes: 3 messages come near, 2 from outside by 2 cards
    assert network().time_all_gather(1e9, 4) == pytest.approx(
        max(3 / 100, 2 / 2 / 10) + 1e-6 + 5e-6
    )
    # half of the buffer near, each GPU its half of it far: 2 * 0.5 GB * 1/2
    assert network().time_all_reduce(1e9, 4) == pytest.approx(
        max(2 * 0.5 / 100, 2 * 0.5 * 0.5 / 10) + 2e-6 + 2 * 5e-6
    )


def test_one_gpu_communicates_nothing():
    alone = exchange(1, 0, 0)
    assert (
        network().time_all_to_all(alone).sum()
        == network().time_all_gather(1e9, 1)
        == network().time_all_reduce(1e9, 1)
        == 0
    )


def test_an_exchange_leaves_a_rank_its_own_part():
    moved = network().split_exchange(np.full(4, 8.0), np.full(4, 8.0))
    np.testing.assert_allclose([moved.sent_near[0], moved.sent_far[0]], [2.0, 4.0])


def test_presets_load_and_say_what_they_are():
    assert {"paper", "h200", "ethernet", "this-machine"} <= set(list_presets())
    for name in list_presets():
        assert load_preset(name).about
    paper = load_preset("paper")
    assert (paper.near.gb_per_s, paper.far.gb_per_s, paper.cards_per_node) == (300.0, 25.0, 8)
    with pytest.raises(ValueError, match="unknown preset 'mars'.*paper"):
        load_preset("mars")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param(
            {"far": Link(0.0, 1.0)}, "far.gb_per_s is 0.0", id="far link without bandwidth"
        ),
        pytest.param(
            {"near": Link(float("nan"), 1.0)}, "near.gb_per_s is nan", id="near bandwidth is NaN"
        ),
        pytest.param(
            {"pcie": Link(1.0, -1.0)}, "pcie.latency_us is -1.0", id="negative PCIe latency"
        ),
        pytest.param({"gpus_per_node": 0}, "gpus_per_node is 0", id="no GPUs in a node"),
        pytest.param({"cards_per_node": 1.5}, "cards_per_node is 1.5", id="fractional cards"),
        pytest.param({"incast": 1.0}, "incast is 1.0", id="incast of 1"),
    ],
)
def test_impossible_networks_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        network(**changed)


def test_gpus_must_fill_their_nodes():
    with pytest.raises(ValueError, match="7 GPUs do not fill nodes of 2"):
        network().check(7)
    network().check(1)
    network().check(6)


def test_a_file_with_unknown_or_missing_entries_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("gpus_per_node = 8\nlane = 3\n[near]\ngb_per_s = 1\n")
    with pytest.raises(ValueError, match="unknown 'lane'.*'cards_per_node' is missing"):
        load_network(path)
    path.write_text("gpus_per_node = ")
    with pytest.raises(ValueError, match="not readable as TOML"):
        load_network(path)
    with pytest.raises(ValueError, match="no such file"):
        load_network(tmp_path / "none.toml")
    links = "".join(f"[{way}]\ngb_per_s = 2\nlatency_us = 1\n" for way in ("near", "far", "pcie"))
    path.write_text(f"gpus_per_node = 4\ncards_per_node = 2\n{links}")
    assert load_network(path).far == Link(2.0, 1.0) and load_network(path).name == "mine"
    path.write_text(f"gpus_per_node = 4\ncards_per_node = 2\n{links}width = 3\n")
    with pytest.raises(ValueError, match="tables with gb_per_s and latency_us"):
        load_network(path)
