"""A dataclass of ours is one of `dataclasses`, and a regular expression one of `re`; only their code is made later."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest

from ckptconv.later import dataclass, regex


class Body:
    """What both classes of a pair are made of."""

    def body(self, made: Callable[..., Any], **settings: Any) -> Any:
        @made(**settings)
        class Point:
            kind: ClassVar[str] = "point"
            x: int
            label: str = "none"
            tags: list[str] = field(default_factory=list, compare=not settings.get("frozen"))
            hidden: int = field(default=0, repr=False, compare=False)

        return Point


SETTINGS: list[dict[str, Any]] = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"eq": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_like_the_standard_librarys(settings: dict[str, Any]) -> None:
    ours, theirs = (Body().body(made, **settings) for made in (dataclass, dataclasses.dataclass))
    for each in (ours, theirs):
        each.__qualname__ = "Point"
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((1,), {}), ((1, "a"), {"hidden": 3}), ((2, "a", ["b"]), {})]
    for arguments, named in given:
        a, b = (each(*arguments, **named) for each in (ours, theirs))
        assert repr(a) == repr(b)
        assert dataclasses.asdict(a) == dataclasses.asdict(b)
        assert dataclasses.replace(a, x=5).x == 5
        assert (a == ours(*arguments)) == (b == theirs(*arguments))
        assert a != b
        assert (ours.__hash__ is None) == (theirs.__hash__ is None)
        if settings.get("frozen"):
            assert hash(a) == hash(b)
        assert hasattr(a, "__dict__") == hasattr(b, "__dict__")
    assert ours.__match_args__ == theirs.__match_args__
    assert ours(1).tags is not ours(1).tags
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    for wrong in ((), (1, 2, 3, 4, 5)):
        texts = []
        for each in (ours, theirs):
            with pytest.raises(TypeError) as caught:
                each(*wrong)
            texts.append(str(caught.value).removeprefix("Body.body.<locals>."))
        assert texts[0] == texts[1]


@dataclass(frozen=True)
class Base:
    a: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.a)


@dataclass(frozen=True)
class Derived(Base):
    b: int = 2

    def __repr__(self) -> str:
        return "own"


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    next: Slotted | None = None


def test_bases_and_own_methods_are_kept() -> None:
    made = Derived(1)
    assert (made.a, made.b, vars(made)["doubled"], repr(made)) == (1, 2, 2, "own")
    assert made != Base(1)
    assert made == Derived(a=1, b=2)


@pytest.mark.parametrize("made", [Base(1), Derived(1, 3), Slotted(1, Slotted(2))], ids=lambda made: type(made).__name__)
def test_frozen_ones_stay_as_they_are_and_travel(made: Any) -> None:
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'a'"):
        made.a = 2
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'a'"):
        del made.a
    with pytest.raises((FrozenInstanceError, TypeError)):
        made.other = 2
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


def test_no_code_is_made_of_a_class_that_is_not_used() -> None:
    @dataclass(frozen=True)
    class Used:
        a: int

    before = vars(Used)["__init__"]
    assert "a" not in before.__code__.co_varnames
    assert dataclasses.fields(Used)[0].name == "a"
    assert vars(Used)["__init__"] is before
    assert Used(1).a == 1
    assert vars(Used)["__init__"].__code__.co_varnames == ("self", "a")


def test_an_expression_is_compiled_when_it_is_used() -> None:
    wrong = regex("(")
    with pytest.raises(Exception, match="missing \\)"):
        wrong.match("")
    number = regex(r"(\d+)")
    assert number.fullmatch("12")
    assert number.sub("x", "a1") == "ax"
    assert number.pattern == r"(\d+)"
    assert pickle.loads(pickle.dumps(number)).findall("1 2") == ["1", "2"]
    assert not hasattr(number, "no_such_thing")
