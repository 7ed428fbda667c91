"""Ranks without shared memory that agree on their collectives: a program in C++.

`make sanitize` runs it under the sanitizers.
"""

from __future__ import annotations

import pytest

from tests.native import build


@pytest.mark.long
def test_agreement() -> None:
    output = build.run(build.build("agreement_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_ranks_meet() -> None:
    output = build.run(build.build("meeting_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_leaders_pass_on_little_data() -> None:
    output = build.run(build.build("leaders_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_what_rank_0_makes_of_it() -> None:
    output = build.run(build.build("coordinator_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_what_is_given_is_what_is_taken() -> None:
    output = build.run(build.build("contribution_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_what_a_rank_makes_of_what_it_hears() -> None:
    output = build.run(build.build("participant_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_messages_that_ranks_say_to_each_other() -> None:
    output = build.run(build.build("deliveries_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_messages_that_are_late() -> None:
    output = build.run(build.build("late_messages_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_data_that_comes_to_who_receives_it() -> None:
    output = build.run(build.build("landing_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_what_goes_over_which_line() -> None:
    output = build.run(build.build("duties_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_rank_0_goes_on_for_the_others() -> None:
    output = build.run(build.build("service_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_what_is_heard_over_lines_is_checked() -> None:
    output = build.run(build.build("fuzz_lines_test", build.SOURCES))
    print(output)
    assert output.endswith("tests passed\n")


def test_threads_for_what_may_block() -> None:
    output = build.run(build.build("thread_pool_test", []))
    print(output)
    assert output.endswith("tests passed\n")


def test_death_sockets() -> None:
    output = build.run(build.build("death_sockets_test", ["death_sockets", "process"]))
    print(output)
    assert output.endswith("tests passed\n")
