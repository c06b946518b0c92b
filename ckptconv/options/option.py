"""An option: its values, their checks, and its place in tables.

A table is a mapping of names to options. Classes of options hold the values that a caller gave (`Given`), and functions
of the library check their keywords by a table (`checked`).
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ckptconv.errors import UsageError
from ckptconv.options import NAMING, REPORTING
from ckptconv.options.kinds import FLAG, MAPPING, Default, OptionWarning, ValueKind
from ckptconv.options.registered import FLAGS, missing
from ckptconv.text import UNSET, brief

if TYPE_CHECKING:
    import inspect

    from typing_extensions import Self

_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class Option:
    """One option: its values, and its names and help on the command line.

    `about` is its help. `default` is as a user would write it; None is the kind's. `fallback` is in words the behaviour
    without it, if `default` does not say it: a text, or {command: text}, with "" for all other commands. `flags` are
    its names on the command line if not its own name; a flag that is True by default is turned off there by --no-…
    `group` is its place in the help; `common`: the short help has it too, of every command that
    takes it, or of those that are named. `env` is the environment variable that gives
    the command line's default. `decides`: the content of an output depends on it, so manifests and plan ids record it.
    `former` is a flag that it had, and its name in Python with that: both are still taken, with a warning. `origin` is
    the option that it repeats with another help.
    """

    name = ""

    def __init__(
        self,
        kind: ValueKind,
        about: str = "",
        *,
        default: Any = None,
        flags: tuple[str, ...] = (),
        metavar: str | None = None,
        group: str = REPORTING,
        fallback: str | Mapping[str, str] = "",
        common: bool | str = False,
        env: str = "",
        decides: bool = False,
        former: str = "",
    ) -> None:
        self.kind, self.about, self.written = kind, about, default
        self.flags, self.metavar, self.group, self.decides = flags, metavar, group, decides
        self.fallback, self.common, self.env, self.former = fallback, common, env, former
        self.origin = self

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name
        self.default = self.kind.unset if self.written is None else self.kind.parse(self.written, name)
        words = name.replace("_", "-")
        self.flags = self.flags or ((f"--no-{words}" if self.default is True else f"--{words}"),)

    def __repr__(self) -> str:
        return f"<{self.flags[0]}: {self.about}>"

    def explained(
        self, about: str, fallback: str | Mapping[str, str] = "", kind: ValueKind | None = None, former: str = ""
    ) -> Option:
        """Return the same option with another help, with other values if `kind` is given, and with a `former` name."""
        copied = copy.copy(self)
        copied.about, copied.fallback, copied.written, copied.kind = about, fallback, None, kind or self.kind
        copied.former = former
        return copied

    @property
    def former_name(self) -> str:
        """The option's former name in Python; "" if it has none."""
        return self.former.lstrip("-").replace("-", "_")

    @property
    def accepts(self) -> str:
        """The type of the option's values in Python, as type checkers read it."""
        return self.kind.accepts if self.kind is FLAG else f"{self.kind.accepts} | None"

    def parse(self, value: Any, called: str = "") -> Any:
        """Return the parsed `value`; None gives the default. Raise UsageError for an invalid one; it names the option
        `called`, or by its own name."""
        if value is None and self.kind is not FLAG:
            return copy.copy(self.default)
        # The value for every command has been parsed, and stays marked.
        return value if isinstance(value, Default) else self.kind.parse(value, called or self.name)

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a function."""
        import inspect

        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=self.default, annotation=self.accepts)

    def of_environment(self) -> Any:
        """Return the value of the option's environment variable; None if it is not set, or empty."""
        text = os.environ.get(self.env, "") if self.env else ""
        if not text:
            return None
        if self.kind is not FLAG:
            value = self.parse(text, self.env)
            return Default(value) if isinstance(value, str) else value
        if text.lower() not in _SWITCHES:
            raise UsageError(f"{self.env} is {brief(text)}; it may be 1 or 0.")
        return _SWITCHES[text.lower()]

    def of_words(self, words: Any) -> Any:
        """Return the value of a command line's words; for a flag, whether it was given. Raise UsageError for an empty
        word, which is no value of an option that may be left out."""
        if words == "" and self.kind is not MAPPING:
            raise UsageError(f"{self.flags[-1]} is empty.", UNSET)
        return self.parse(words is not self.default if self.kind is FLAG else words, self.flags[0])


class FeatureOption(Option):
    """An option of a conversion that a feature adds. The feature is imported when more than the name is needed.

    Its flag is its name, or those of `FLAGS`; it has no former name, and no variable gives its value.
    """

    former = env = ""

    def __init__(self, name: str, feature: str) -> None:
        self.name, self._feature = name, feature
        self.flags = FLAGS.get(name) or (f"--{name.replace('_', '-')}",)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(import_module(f"ckptconv.features.{self._feature}.options").GIVEN.table[self.name], attribute)


def former_given(former: str, option: Option) -> None:
    """Warn the caller that `option` was given by its `former` flag."""
    import warnings

    reads = ": it reads the states from PATH" if option.metavar == "PATH" else ""
    warnings.warn(f"{former} is called {option.flags[0]} here{reads}.", OptionWarning, stacklevel=3)


def option(kind: ValueKind, about: str = "", **settings: Any) -> Any:
    """Return an option; for type checkers, it has the type of its value."""
    return Option(kind, about, **settings)


def options_in(owner: type) -> dict[str, Option]:
    return {name: option for name, option in vars(owner).items() if isinstance(option, Option)}


class _Signature:
    """The signature of a class of options. It is made when it is first used: `inspect` takes longer to import than
    everything that a start needs."""

    def __get__(self, instance: Any, owner: type[Given]) -> inspect.Signature:
        import inspect

        return inspect.Signature([option.parameter() for option in owner.table.values()])


class Given:
    """Values of options as attributes: parsed, or the default if not given. They cannot be set.

    Of `vars`, an instance has the values that are not the default, a class the options.
    """

    table: ClassVar[dict[str, Option]]
    __signature__ = _Signature()

    def __init_subclass__(cls) -> None:
        cls.table = options_in(cls)

    def __init__(self, **values: Any) -> None:
        for name in [name for name in values if name not in self.table]:
            raise import_module(_WORDS).unknown(name, self.table)
        for name, value in values.items():
            parsed = self.table[name].parse(value)
            if parsed != self.table[name].default:
                vars(self)[name] = parsed

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return copy.copy(value.default) if isinstance(value, Option) else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"cannot set {name!r} of {type(self).__name__}: use `replaced`")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # some values are mappings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def asked(self, name: str) -> Any:
        """Return the value of an option, None if that is the default or there is no such option. No feature is imported
        for it."""
        return vars(self).get(name)

    @classmethod
    def of(cls, options: Given) -> Self:
        """Return those of `options` that this class has."""
        return cls(**{name: getattr(options, name) for name in cls.table})

    def replaced(self, **changes: Any) -> Self:
        """Return these options with `changes` to their values."""
        return type(self)(**{**vars(self), **changes})


naming = functools.partial(option, group=NAMING)
deciding = functools.partial(option, decides=True)


_Function = TypeVar("_Function", bound=Callable[..., Any])
# The flags of code with a * and a ** parameter, as `inspect` has them; and where wrong arguments are put into words.
_TAKES_MORE, _TAKES_KEYWORDS, _WORDS = 0x04, 0x08, "ckptconv.options.words"


def checked(
    table: Mapping[str, Option], instead: Mapping[str, Any] = MappingProxyType({}), called: str = ""
) -> Callable[[_Function], _Function]:
    """Decorate a library function: parse its keyword arguments that are options of `table`, and raise UsageError for an
    argument that neither the function nor, if it accepts any keywords, `table` knows. Its signature shows them all.

    `instead` has what to do without options that it lacks: {names in one text: advice}. `called` is its public name, if
    that is another.
    """

    def decorate(function: Any) -> Any:
        public_name = called or function.__qualname__.removesuffix(".__init__")
        code = function.__code__
        own_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        in_order, needed = own_names[: code.co_argcount], code.co_argcount - len(function.__defaults__ or ())
        open_ended = bool(code.co_flags & _TAKES_KEYWORDS)
        known = [*own_names, *(name for name in table if open_ended and name not in own_names)]
        formers = {table[name].former_name: table[name] for name in known if name in table and table[name].former}

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in [name for name in formers if name in keywords and name not in known]:
                option = formers[name]
                if option.name in keywords:
                    raise UsageError(f"{name} and {option.name} are the same option: give only one of them.")
                former_given(option.former, option)
                keywords[option.name] = keywords.pop(name)
            for name, value in keywords.items():
                # A function may name an option of a feature that is not installed.
                if name not in known or (missing(name) and value):
                    raise import_module(_WORDS).unknown(name, known, public_name, instead, value)
                if name in table:
                    keywords[name] = table[name].parse(value)
            lacks = {*own_names[len(args) : needed]}.difference(keywords)
            if lacks or not (code.co_flags & _TAKES_MORE or len(args) <= len(in_order)):
                raise import_module(_WORDS).miscounted(public_name, in_order, len(args), lacks, instead)
            return function(*args, **keywords)

        if open_ended:
            call.__wrapped__ = _Expanded(function, {name: table[name] for name in known[len(own_names) :]})  # type: ignore[assignment]
        return call

    return decorate


class _Expanded:
    """The wrapped function, as `inspect` sees it: its signature has the options of `table` instead of any keywords.

    The signature is made when it is first used, as for `_Signature`. Its text, which `help` shows above the docstring,
    has the function's own parameters alone.
    """

    def __init__(self, function: Any, table: Mapping[str, Option]) -> None:
        self.__wrapped__, self._table = function, table

    @property
    def __signature__(self) -> inspect.Signature:
        import inspect

        table = self._table

        class Expanded(inspect.Signature):
            def __str__(self) -> str:
                kept = [
                    parameter.replace(annotation=parameter.empty)
                    for name, parameter in self.parameters.items()
                    if name not in table
                ]
                keywords = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
                return str(inspect.Signature([*kept, keywords]))

            def format(self, **_: Any) -> str:  # which `help` calls from Python 3.13 on
                return str(self)

        signature = inspect.signature(self.__wrapped__)
        kept = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        return Expanded(
            [*kept, *(option.parameter() for option in table.values())], return_annotation=signature.return_annotation
        )


def filled(table: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed `values`, and the defaults of the other options in `table`."""
    return {name: values[name] if name in values else copy.copy(option.default) for name, option in table.items()}
