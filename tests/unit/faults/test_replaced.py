"""A function stands in for a class or a function until exit."""

import dataclasses

from verifier.faults.fault import FireCounter, replaced


@dataclasses.dataclass
class Given:
    """Something that a fault is given in the place of."""

    size: int = 0


def test_a_dataclass_that_is_replaced_still_says_which_fields_it_has():
    fire = FireCounter()
    with replaced(f"{__name__}:Given(size)", lambda call: call.faulty(size=call.size + 1), fire):
        assert list(Given.__dataclass_fields__) == ["size"]
        assert Given(size=1).size == 2
    assert (Given(size=1).size, fire.count) == (1, 1)
