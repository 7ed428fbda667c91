"""What ``benchmarks/hosts.py`` makes of its measurements."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import hosts

MiB = 1 << 20
OPTIONS = argparse.Namespace(mbit=1000, delay_us=100, rounds=3)
LINK = {"latency": 200e-6, "rate": 118e6, "together": 117.5e6, "inside": 4e9}


def case(collective: str, size: int, **times: list[float] | float) -> dict[str, Any]:
    """Of each peer three rounds, or three that are alike."""
    peers = {"gloo": 1.0, "flat": 1.0, "shm_gloo": 1.0, "shm_mpi": 1.0, "again": 1.0, **times}
    rounds = {
        name.replace("_", "+"): each if isinstance(each, list) else [each] * 3
        for name, each in peers.items()
    }
    again = rounds.pop("again")
    return {"collective": collective, "size": size, "times": rounds, "again": again}


def judged(*cases: dict[str, Any], layout: str = "2x2") -> dict[str, list[str]]:
    """By what is aimed at: the aim, what was measured, and the outcome."""
    table = hosts.judged(layout, [LINK, *cases], OPTIONS)
    return {row[0]: row[1:] for row in table.rows}


def test_the_largest_all_reduce_is_held_against_its_bound() -> None:
    # Between two hosts each link carries all of it once: 16 MiB at 117.5 MB/s.
    limit = 16 * MiB / 117.5e6
    for ours, outcome in ((1.05 * limit, "met"), (1.1 * limit, "met"), (1.11 * limit, "missed")):
        # The faster of ours, by the median.
        mpi = [9 * limit, ours, 0.1 * limit]
        all_reduce = case("all_reduce", 16 * MiB, gloo=1.5 * limit, shm_gloo=2 * limit, shm_mpi=mpi)
        rows = judged(all_reduce)
        aim, measured, got = rows["all_reduce of 16 MiB, against the link's bound"]
        assert (aim, got) == ("<= 1.1 times", outcome)
        assert measured == f"{ours / limit:.2f} times (gloo 1.50)"


def test_every_large_collective_is_held_against_its_bound() -> None:
    small = case("all_gather", MiB, shm_gloo=5.0)  # what is small is none of it, nor are messages
    message = case("send_recv", 4 * MiB, shm_gloo=5.0)
    gather, exchange = (
        case(name, 4 * MiB, shm_gloo=times * bound)
        for name, times, bound in (
            ("all_gather", 1.2, 200e-6 + 2 * MiB / 117.5e6),
            ("all_to_all", 1.3, 200e-6 + 4 * MiB / 117.5e6),
        )
    )
    what = "every collective of 4 MiB and more, against its bound"
    assert judged(small, message, gather)[what][1:] == [
        "at worst 1.20 times (all_gather 4 MiB)",
        "met",
    ]
    assert judged(small, message, gather, exchange)[what] == [
        "<= 1.25 times",
        "at worst 1.30 times (all_to_all 4 MiB)",
        "1 of 2 met",
    ]


def test_8_bytes_are_held_against_the_latency() -> None:
    for layout, over, aim, outcome in (
        ("2x2", 59e-6, 60, "met"),
        ("2x2", 61e-6, 60, "missed"),
        ("4x2", 149e-6, 150, "met"),
    ):
        rows = judged(case("all_reduce", 8, shm_gloo=200e-6 + over), layout=layout)
        row = rows["all_reduce of 8 B, over the latency"]
        assert row == [f"<= {aim} us", f"{over * 1e6:.0f} us", outcome]


def test_slower_than_gloo_is_what_is_so_in_every_round() -> None:
    what = "shm+gloo against gloo and the flat fall-back, every size, messages too"
    noisy = case("send_recv", 8, gloo=[1.0, 3.0, 1.0], flat=2.0, shm_gloo=[1.5, 1.9, 1.5])
    slower = case("all_gather", 8, gloo=2.0, flat=[1.0, 1.1, 1.2], shm_gloo=[1.2, 1.2, 1.3])
    again = "; the fall-back again at worst 1.00 times (send_recv 8 B)"
    assert judged(noisy)[what] == [
        "<= 1 times beyond noise",
        f"at worst 1.50 times (send_recv 8 B){again}, 1 of 1 met",
        "met",
    ]
    assert judged(noisy, slower)[what][1:] == [
        f"at worst 1.50 times (send_recv 8 B){again}, 2 of 2 met",
        "1 of 2 met",
    ]


def test_a_second_fall_back_is_held_against_the_same() -> None:
    what = "shm+gloo against gloo and the flat fall-back, every size"
    slower = case("all_gather", 8, flat=[1.0, 1.1, 1.2], again=[1.1, 1.2, 1.3], gloo=2.0)
    faster = case("all_reduce", 64 << 10, flat=1.0, again=[1.2, 0.9, 1.1], gloo=2.0)
    measured = judged(slower, faster)[what][1]
    said = "; the fall-back again at worst 1.10 times (all_reduce 64 KiB), 1 of 2 met"
    assert measured.endswith(said), measured


def test_the_model_is_held_against_what_it_says_of_our_algorithms() -> None:
    # It is told of the smallest collectives, and so knows one that is alone.
    known = case("all_reduce", 8, gloo=2e-3, shm_gloo=400e-6)
    model = hosts.model_of("2x2", LINK, [known])
    for name, size, algorithm in (
        ("all_reduce", 4096, "piggyback"),
        ("all_reduce", 64 << 10, "piggyback"),
        ("all_reduce", 256 << 10, "rails"),
        ("all_gather", 4 * MiB, "rails"),
    ):
        says = model.times(hosts.OPS.get(name, name), 4, size)[algorithm]
        for times, outcome in ((1.14, "met"), (0.86, "met"), (1.16, "1 of 2 met")):
            row = judged(known, case(name, size, shm_gloo=times * says))["the model's times"]
            off = abs(times - 1)
            measured = f"median {off / 2:.0%} off, worst {off:.0%}"
            assert row == ["within 15%", measured, outcome], algorithm


def test_the_model_of_little_is_the_middle_of_all_collectives() -> None:
    # The middle of 400 and 441 us is 420, from which both are 5 % away.
    little = (
        case("all_reduce", 8, gloo=2e-3, shm_gloo=400e-6),
        case("all_gather", 8, shm_gloo=441e-6),
    )
    message = case("send_recv", 8, shm_gloo=5e-3)
    assert judged(*little, message)["the model's times"] == [
        "within 15%",
        "median 5% off, worst 5%",
        "met",
    ]


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("layout", ["2x2", "4x2"])
def test_what_was_not_measured_is_not_judged(layout: str, collective: str) -> None:
    """The model is told of an all_reduce of 8 B."""
    assert list(judged(case(collective, 64 << 10), layout=layout)) == [
        "shm+gloo against gloo and the flat fall-back, every size"
    ]


def test_other_links_have_targets_of_their_own() -> None:
    said = [LINK, case("all_reduce", 8)]
    for changes, title in (
        ({}, "hosts 4x2"),
        ({"mbit": 250.0}, "hosts 4x2 at 250 Mbit/s"),
        ({"delay_us": 500}, "hosts 4x2 at 500 µs"),
        ({"mbit": 250.0, "delay_us": 500}, "hosts 4x2 at 250 Mbit/s, 500 µs"),
    ):
        options = argparse.Namespace(**{**vars(OPTIONS), **changes})
        assert hosts.judged("4x2", said, options).title == f"Targets: {title}"
        assert hosts.table_of("4x2", said, options).title.startswith(f"{title}: ")
