"""Makes harmless files of objects that a seed draws, from whatever libraries are installed: no two seeds make the same.

    python scripts/scan/drawn.py SEED DIRECTORY [SECTION …]

Classes, their arguments and what they are fitted on are drawn: estimators with values that their own constraints allow,
layers and optimizers, distributions, frames, arguments of training, configurations, checkpoints of many layouts. So a
grammar that was made with one seed is measured with another. `corpus.py` has the objects that were chosen by hand.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import enum
import importlib
import inspect
import pathlib
import random
import subprocess
import sys
import traceback
import typing
import uuid
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from corpus import Corpus

Section = Callable[["Drawn"], None]
SECTIONS: dict[str, Section] = {}
# Objects of a section.
COUNT = 30
NAMES = [
    "lr",
    "epoch",
    "best_score",
    "cfg",
    "hparams",
    "seed",
    "betas",
    "device",
    "metrics",
    "vocab",
    "tags",
    "when",
    "out",
    "run",
    "steps",
]


def section(make: Section) -> Section:
    SECTIONS[make.__name__.strip("_")] = make
    return make


class Drawn(Corpus):
    """The directory of one seed, and what is drawn with it."""

    def __init__(self, seed: int, directory: pathlib.Path, section: str) -> None:
        super().__init__("drawn", directory, section)
        self.rng = random.Random(f"{seed} {section}")
        for _ in range(self.rng.randrange(10)):
            next(self._ways)

    def several(self, make: Callable[[], tuple[str, Any]], count: int = COUNT, *ways: str) -> None:
        """Write so many objects that `make` draws, each with a name; what the library refuses is drawn again."""
        for number in range(count):
            for _ in range(20):
                with contextlib.suppress(Exception):
                    name, value = make()
                    self.put(f"{number}-{name}", value, *([self.rng.choice(ways)] if ways else []))
                    break

    def plain(self, depth: int = 0) -> Any:
        """Draw what programs note beside tensors."""
        rng = self.rng
        if depth < 3 and rng.random() < 0.4:
            parts = [self.plain(depth + 1) for _ in range(rng.randrange(4))]
            names = rng.sample(NAMES, len(parts))
            return rng.choice(
                [list, tuple, collections.deque, lambda parts: dict(zip(names, parts, strict=True)),
                 lambda parts: collections.OrderedDict(zip(names, parts, strict=True)),
                 lambda parts: argparse.Namespace(**dict(zip(names, parts, strict=True))),
                 lambda parts: SimpleNamespace(**dict(zip(names, parts, strict=True))),
                 lambda parts: collections.defaultdict(rng.choice([list, dict, int, set]), zip(names, parts, strict=True))]
            )(parts)  # fmt: skip
        return rng.choice(
            [None, True, rng.randrange(10**6), rng.random(), -(10**20), "text", "", b"bytes", 1j, float("inf"),
             rng.choice([pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath])("a/b"), {1, 2}, frozenset("ab"),
             datetime.datetime(2024, rng.randrange(1, 12), 3, tzinfo=rng.choice([None, datetime.timezone.utc])),
             datetime.timedelta(rng.randrange(99)), decimal.Decimal("1.25"), uuid.UUID(int=rng.randrange(10**9)), range(3),
             collections.Counter("abca"), *self.of_libraries()]
        )  # fmt: skip

    def of_libraries(self) -> list[Any]:
        with contextlib.suppress(ImportError):
            import numpy as np

            return [
                np.float32(0.5), np.int64(3), np.bool_(True), np.random.rand(2, 3), np.arange(5), np.array(["a", "bc"]),
                np.zeros(2, [("a", "i4")]), np.array([None, "x"], object), np.datetime64("2024-01-02"), np.float16,
                np.dtype("f4"),
            ]  # fmt: skip
        return []


# ------------------------------------------------------------------------------------------------------- scikit-learn


def _value(drawn: Drawn, constraint: Any) -> Any:
    """Draw what a constraint of scikit-learn allows. Raises LookupError if it names none."""
    rng, kind = drawn.rng, type(constraint).__name__
    if constraint is None or (isinstance(constraint, (bool, int, str, float)) and not isinstance(constraint, str)):
        return constraint
    if kind in ("StrOptions", "Options"):
        return rng.choice(sorted(constraint.options, key=str))
    if kind == "Interval":
        is_int = "Real" not in str(constraint.type)
        low = constraint.left if constraint.left is not None else -3
        high = constraint.right if constraint.right is not None else low + 6
        low = max(low, -3)
        high = min(high, low + 6)
        return (
            rng.randint(int(low) + (constraint.closed in ("right", "neither")), max(int(high), int(low) + 1))
            if is_int
            else rng.uniform(low + 1e-3, high - 1e-3)
        )
    if constraint == "boolean":
        return rng.random() < 0.5
    if constraint == "random_state":
        import numpy as np

        return rng.choice([None, 3, np.random.RandomState(5)])
    raise LookupError(constraint)


def _estimator(drawn: Drawn, classes: list[tuple[str, Any]], depth: int = 0) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    rng = drawn.rng
    name, cls = rng.choice(classes)
    inner = (lambda: _estimator(drawn, classes, depth + 1)) if depth < 1 and rng.random() < 0.5 else LogisticRegression
    given: dict[str, Any] = {}
    for parameter in inspect.signature(cls.__init__).parameters.values():
        word = parameter.name
        if word in ("estimator", "base_estimator", "final_estimator", "regressor", "classifier"):
            given[word] = inner() if "Regress" not in name else Ridge()
        elif word in ("estimators", "transformer_list", "steps"):
            given[word] = [("a", inner()), ("b", LogisticRegression())]
        elif word == "transformers":
            given[word] = [("a", inner(), [0, 1]), ("b", rng.choice(["drop", "passthrough"]), slice(2, 3))]
        elif word in ("param_grid", "param_distributions"):
            given[word] = {"C": [0.1, 1.0]}
        elif rng.random() < 0.4:
            constraints = getattr(cls, "_parameter_constraints", {}).get(word, [])
            with contextlib.suppress(LookupError, ValueError):
                given[word] = _value(drawn, rng.choice(constraints))
    return cls(**given)


def _fitted(drawn: Drawn, model: Any) -> Any:
    import numpy as np
    from sklearn.base import clone
    from sklearn.datasets import make_classification

    x, y = make_classification(50, 5, random_state=drawn.rng.randrange(99))
    words = np.array(["a", "b", "c"])
    inputs = [
        (x, y), (x, words[y]), (x, y.astype(float)), (np.abs(x), y), (x, np.stack([y, y], 1)), (y, y),
        (["a b c", "b c d", "a d e"] * 16 + ["a b"] * 2, y), ([{"a": 1, "b": "c"}] * 50, y), (words[np.round(np.abs(x)).astype(int) % 3], y),
    ]  # fmt: skip
    for data in [drawn.rng.choice(inputs[:2]), *inputs]:
        with contextlib.suppress(Exception):
            return clone(model).fit(*data)
    return model


@section
def sklearn(drawn: Drawn) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import all_estimators

    classes = all_estimators()

    def make() -> tuple[str, Any]:
        model = _fitted(drawn, _estimator(drawn, classes))
        name = type(model).__name__
        return name, drawn.rng.choice(
            [
                model,
                model,
                make_pipeline(StandardScaler(), model),
                {"model": model, "info": drawn.plain()},
                [model, drawn.plain()],
            ]
        )

    drawn.several(make, 3 * COUNT)


@section
def imblearn(drawn: Drawn) -> None:
    import numpy as np
    from imblearn.utils.testing import all_estimators

    x, y = np.random.rand(60, 4), np.arange(60) % 3 // 2

    def make() -> tuple[str, Any]:
        model = _estimator(drawn, all_estimators())
        with contextlib.suppress(Exception):
            (model.fit_resample if hasattr(model, "fit_resample") else model.fit)(x, y)
        return type(model).__name__, model

    drawn.several(make, 10)


@section
def boosting(drawn: Drawn) -> None:
    import numpy as np

    rng = drawn.rng
    x = np.random.rand(60, 4)
    y = (x[:, 0] > 0.5).astype(int)

    def make() -> tuple[str, Any]:
        library = rng.choice(["xgboost", "lightgbm", "catboost"])
        task = rng.choice(["Classifier", "Regressor", "Ranker"])
        given: dict[str, Any] = {}
        if library == "xgboost":
            import xgboost as module

            given = {"booster": rng.choice(["gbtree", "gblinear", "dart"]), "n_estimators": 2, "reg_alpha": rng.random(), "missing": rng.choice([np.nan, -1.0]), "monotone_constraints": rng.choice([None, (1, 0, 0, 0)]), "device": "cpu"}  # fmt: skip
            cls = getattr(module, f"XGB{task}")
        elif library == "lightgbm":
            import lightgbm as module

            given = {"boosting_type": rng.choice(["gbdt", "dart"]), "n_estimators": 2, "verbose": -1, "importance_type": rng.choice(["split", "gain"]), "random_state": rng.choice([None, 3, np.random.RandomState(1)])}  # fmt: skip
            cls = getattr(module, f"LGBM{task}")
        else:
            import catboost as module

            given = {
                "iterations": 2,
                "verbose": 0,
                "allow_writing_files": False,
                "depth": rng.randint(2, 5),
                "l2_leaf_reg": rng.random(),
            }
            cls = getattr(module, f"CatBoost{task}")
        more = (
            {"group": [30, 30]}
            if task == "Ranker" and library != "catboost"
            else {"group_id": [0] * 30 + [1] * 30}
            if task == "Ranker"
            else {}
        )
        model = cls(**given).fit(x, y, **more)
        return f"{library}-{task}", rng.choice([model, {"model": model, "info": drawn.plain()}])

    drawn.several(make, 12)


# -------------------------------------------------------------------------------------------------- numpy, scipy, pandas


@section
def numpy(drawn: Drawn) -> None:
    import numpy as np

    rng = drawn.rng
    codes = [
        "?",
        "b",
        "B",
        "h",
        "H",
        "i",
        "I",
        "l",
        "L",
        "q",
        "Q",
        "e",
        "f",
        "d",
        "g",
        "F",
        "D",
        "S3",
        "U4",
        "V5",
        "M8[s]",
        "m8[D]",
        "O",
    ]

    def make() -> tuple[str, Any]:
        kind = rng.choice(["array", "array", "struct", "scalar", "generator", "masked", "poly", "dtype", "record"])
        code = rng.choice(codes)
        shape = tuple(rng.randrange(4) for _ in range(rng.randrange(4)))
        order = rng.choice(["C", "F"])
        array = np.zeros(shape, rng.choice(["", ">" if code[0] not in "?bBSO" else ""]) + code, order=order)
        if kind == "struct":
            array = np.zeros(shape, [("a", code), ("b", "f4", (2,)), ("c", [("d", "i2")])])
        elif kind == "scalar":
            return kind, {"x": np.zeros(1, code)[0], "y": np.ones(1, rng.choice("fdilq"))[0]}
        elif kind == "generator":
            bits = getattr(np.random, rng.choice(["PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"]))(
                rng.choice([3, [1, 2]])
            )
            return kind, rng.choice([bits, np.random.Generator(bits), np.random.RandomState(bits), bits.seed_seq])
        elif kind == "masked":
            return kind, np.ma.masked_array(
                np.arange(4).astype(rng.choice("fdil")),
                mask=rng.choice([[0, 1, 0, 1], False]),
                fill_value=rng.choice([None, 9]),
            )
        elif kind == "poly":
            return kind, getattr(
                np.polynomial, rng.choice(["Polynomial", "Legendre", "Hermite", "HermiteE", "Laguerre", "Chebyshev"])
            )([1, 2, 3], rng.choice([None, [0, 1]]))
        elif kind == "dtype":
            return kind, [array.dtype, type(array.dtype), array.dtype.type]
        elif kind == "record":
            return kind, rng.choice(
                [
                    np.rec.fromarrays([[1, 2], ["a", "b"]], names="n,s"),
                    np.rec.array([(1, "a")], names="n,s")[0],
                    np.matrix([[1, 2]]),
                    np.asfortranarray(np.ones((2, 3))),
                ]
            )
        return f"{kind}-{code[:1]}", rng.choice([array, [array, drawn.plain()], {"a": array, "b": array.T}])

    drawn.several(make)


@section
def scipy(drawn: Drawn) -> None:
    import numpy as np
    from scipy import interpolate, optimize, signal, sparse, spatial, stats

    rng = drawn.rng
    x = np.arange(9.0)

    def make() -> tuple[str, Any]:
        kind = rng.choice(
            ["sparse", "sparse", "frozen", "frozen", "frozen", "spline", "result", "space", "system", "many"]
        )
        if kind == "sparse":
            form = rng.choice(["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
            made = getattr(sparse, f"{form}_{rng.choice(['matrix', 'array'])}")(
                np.eye(4, dtype=rng.choice(["f4", "f8", "i4", "i8", "c8"]))
            )
            return f"{kind}-{form}", made
        if kind == "frozen":
            distribution = rng.choice(
                [
                    each
                    for each in vars(stats).values()
                    if isinstance(each, (stats.rv_continuous, stats.rv_discrete)) and each.numargs < 3
                ]
            )
            shapes = [
                rng.uniform(0.5, 2.0) if isinstance(distribution, stats.rv_continuous) else 3
                for _ in range(distribution.numargs)
            ]
            return f"{kind}-{distribution.name}", rng.choice(
                [distribution(*shapes), distribution(*shapes, loc=1), distribution]
            )
        if kind == "spline":
            return kind, rng.choice([
                lambda: interpolate.interp1d(x, x, kind=rng.choice(["linear", "nearest", "previous", "next", "quadratic", "zero", "slinear"]), fill_value=rng.choice([np.nan, "extrapolate", (0, 1)]), bounds_error=False),
                lambda: interpolate.BSpline(x, x[:-3], 2), lambda: interpolate.PPoly(np.ones((2, 8)), x), lambda: interpolate.UnivariateSpline(x, x, s=rng.random()), lambda: interpolate.RectBivariateSpline(x, x, np.outer(x, x)),
                lambda: interpolate.make_interp_spline(x, x, k=rng.choice([1, 3])), lambda: interpolate.CubicSpline(x, x, bc_type=rng.choice(["natural", "not-a-knot"])), lambda: interpolate.RegularGridInterpolator((x, x), np.outer(x, x), method=rng.choice(["linear", "nearest"])),
                lambda: interpolate.LinearNDInterpolator(np.random.rand(9, 2), x), lambda: interpolate.KroghInterpolator(x[:4], x[:4]), lambda: interpolate.BarycentricInterpolator(x[:4], x[:4]), lambda: interpolate.SmoothBivariateSpline(np.random.rand(40), np.random.rand(40), np.random.rand(40)),
            ])()  # fmt: skip
        if kind == "result":
            return kind, rng.choice([
                lambda: stats.ttest_1samp(x, 1), lambda: stats.mannwhitneyu(x, x + 1), lambda: stats.kstest(x, "norm"), lambda: stats.chisquare(x + 1), lambda: stats.spearmanr(x, x), lambda: stats.describe(x), lambda: stats.f_oneway(x, x + 1),
                lambda: stats.shapiro(x), lambda: stats.kruskal(x, x + 1), lambda: stats.wilcoxon(x, x + 1), lambda: stats.kendalltau(x, x), lambda: stats.levene(x, x + 1), lambda: stats.linregress(x, x + 1), lambda: stats.anderson(x), lambda: stats.bootstrap((x,), np.mean, n_resamples=9),
                lambda: optimize.linprog([1.0], bounds=(0, 1)), lambda: optimize.least_squares(_difference, [1.0, 2.0]), lambda: optimize.minimize(_sum, [1.0], method=rng.choice(["Nelder-Mead", "BFGS", "L-BFGS-B", "Powell", "SLSQP", "CG"])), lambda: optimize.curve_fit(_line, x, x)[0],
            ])()  # fmt: skip
        if kind == "space":
            points = np.random.rand(12, 2)
            return kind, rng.choice([lambda: spatial.Delaunay(points).simplices, lambda: spatial.KDTree(points, leafsize=4), lambda: spatial.cKDTree(points, boxsize=2.0), lambda: spatial.transform.Rotation.random(3), lambda: spatial.transform.Slerp([0, 1], spatial.transform.Rotation.random(2)), lambda: spatial.procrustes(points, points)])()  # fmt: skip
        if kind == "system":
            return kind, rng.choice([lambda: signal.lti([1.0], [1.0, 2.0]), lambda: signal.dlti([1.0], [1.0, 0.5], dt=0.1), lambda: signal.StateSpace(np.eye(2), np.ones((2, 1)), np.ones((1, 2)), 0), lambda: signal.ZerosPolesGain([1.0], [2.0], 3.0), lambda: signal.firwin(9, 0.3), lambda: signal.ShortTimeFFT(np.ones(8), 4, 10.0)])()  # fmt: skip
        return kind, rng.choice([lambda: stats.multivariate_normal(np.zeros(2), np.eye(2)), lambda: stats.dirichlet([1, 2]), lambda: stats.wishart(3, np.eye(2)), lambda: stats.gaussian_kde(x, bw_method=rng.choice([None, 0.5, "silverman"])), lambda: stats.rv_histogram(np.histogram(x)), lambda: stats.ecdf(x), lambda: stats.qmc.Halton(2, seed=1), lambda: stats.multivariate_t([0, 1], np.eye(2)), lambda: stats.vonmises_fisher([1, 0], 2), lambda: stats.rv_discrete(values=([1, 2], [0.5, 0.5]))])()  # fmt: skip

    drawn.several(make, 2 * COUNT)


def _difference(x: Any) -> Any:
    return x - 1


def _sum(x: Any) -> Any:
    return (x**2).sum()


def _line(x: Any, a: float) -> Any:
    return a * x


@section
def pandas(drawn: Drawn) -> None:
    import numpy as np
    import pandas as pd

    rng, count = drawn.rng, 4
    columns: list[Callable[[], Any]] = [
        lambda: np.arange(count), lambda: np.random.rand(count).astype("f4"), lambda: list("abcd"), lambda: pd.Categorical(list("abab"), ordered=rng.random() < 0.5),
        lambda: pd.date_range("2024", periods=count, freq=rng.choice(["D", "h", "MS", "W", "QE", "B"]), tz=rng.choice([None, "UTC", "Europe/Berlin"])), lambda: pd.timedelta_range("1D", periods=count), lambda: pd.period_range("2024", periods=count, freq=rng.choice(["M", "D", "Q"])),
        lambda: pd.interval_range(0, count), lambda: pd.array([1, None, 3, 4], dtype=rng.choice(["Int64", "Int8", "Float64", "UInt16"])), lambda: pd.array([True, None, False, True], dtype="boolean"), lambda: pd.array([*list("abc"), None], dtype=rng.choice(["string", "str", object])),
        lambda: pd.arrays.SparseArray([0, 0, 1, 2]), lambda: pd.array([1, 2, 3, 4], dtype="int64[pyarrow]"), lambda: np.array([b"a", None, {"x": 1}, [1]], object), lambda: np.zeros(count, complex), lambda: pd.array(list("abcd"), dtype="string[pyarrow]"),
    ]  # fmt: skip
    indexes: list[Callable[[], Any]] = [
        lambda: None, lambda: list("wxyz"), lambda: pd.date_range("2024", periods=count), lambda: pd.MultiIndex.from_product([[1, 2], list("ab")], names=["n", None]), lambda: pd.RangeIndex(2, 10, 2),
        lambda: pd.CategoricalIndex(list("abca")), lambda: pd.IntervalIndex.from_breaks(range(5), closed="left"), lambda: pd.PeriodIndex(["2024-01", "2024-02", "2024-03", "2024-04"], freq="M"), lambda: pd.TimedeltaIndex(range(4), unit="s"), lambda: pd.Index([1.5, 2, 3, 4], name="f"),
    ]  # fmt: skip

    def frame() -> Any:
        made = pd.DataFrame({rng.choice([f"c{at}", at]): rng.choice(columns)() for at in range(rng.randrange(1, 5))})
        index = rng.choice(indexes)()
        return made if index is None else made.set_axis(index)

    def make() -> tuple[str, Any]:
        made = frame()
        kind = rng.choice(["frame", "frame", "series", "index", "array", "mixed", "group", "scalar", "offset"])
        if kind == "series":
            made = made.iloc[:, 0].rename(rng.choice(["s", None, ("a", 1)]))
        elif kind == "index":
            made = rng.choice(indexes[1:])()
            made = made if isinstance(made, pd.Index) else pd.Index(made)
        elif kind == "array":
            made = pd.Series(rng.choice(columns)()).array
        elif kind == "mixed":
            made = {"train": made, "info": drawn.plain()}
        elif kind == "group":
            made = rng.choice(
                [
                    lambda: made.describe(include="all"),
                    lambda: pd.concat([made, made], keys=["a", "b"]),
                    lambda: made.T,
                    lambda: pd.get_dummies(made),
                    lambda: made.dtypes,
                    lambda: made.isna().sum(),
                ]
            )()
        elif kind == "scalar":
            made = [
                pd.Timestamp("2024", tz=rng.choice([None, "UTC"])),
                pd.Timedelta("1D"),
                pd.Period("2024", "M"),
                pd.Interval(0, 1),
                pd.NaT,
                pd.NA,
                np.nan,
            ]
        elif kind == "offset":
            made = [
                pd.offsets.MonthEnd(2),
                pd.offsets.BDay(),
                pd.offsets.Week(weekday=2),
                pd.DateOffset(months=1),
                pd.offsets.QuarterEnd(startingMonth=2),
                pd.offsets.Hour(3),
                pd.tseries.frequencies.to_offset("W-MON"),
            ]
        return kind, made

    drawn.several(make, 2 * COUNT)


# -------------------------------------------------------------------------------------------------------------- torch


def _layer(drawn: Drawn, depth: int = 0) -> Any:
    from torch import nn

    rng = drawn.rng
    if depth < 2 and rng.random() < 0.4:
        parts = [_layer(drawn, depth + 1) for _ in range(rng.randrange(1, 4))]
        return rng.choice([lambda: nn.Sequential(*parts), lambda: nn.ModuleList(parts), lambda: nn.ModuleDict({f"m{at}": part for at, part in enumerate(parts)}), lambda: nn.Sequential(collections.OrderedDict((f"l{at}", part) for at, part in enumerate(parts)))])()  # fmt: skip
    classes = [
        each
        for each in vars(nn).values()
        if isinstance(each, type) and issubclass(each, nn.Module) and each.__module__.startswith("torch.nn.modules")
    ]
    for _ in range(50):
        cls = rng.choice(classes)
        with contextlib.suppress(Exception):
            given = {}
            for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
                if parameter.kind is parameter.VAR_POSITIONAL or parameter.kind is parameter.VAR_KEYWORD:
                    continue
                default = parameter.default
                if default is inspect.Parameter.empty:
                    given[parameter.name] = rng.choice([2, 4])
                elif isinstance(default, bool) and rng.random() < 0.4:
                    given[parameter.name] = not default
                elif isinstance(default, float) and rng.random() < 0.4:
                    given[parameter.name] = default + 0.125
            given |= {"encoder_layer": nn.TransformerEncoderLayer(4, 2, 4)} if "encoder_layer" in given else {}
            given |= {"decoder_layer": nn.TransformerDecoderLayer(4, 2, 4)} if "decoder_layer" in given else {}
            return cls(**given)
    return nn.Identity()


@section
def torch(drawn: Drawn) -> None:
    import torch
    from torch import nn

    rng = drawn.rng
    ways = ("torch", "legacy", "pickle2", "pickle4")

    def optimizer() -> Any:
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        cls = getattr(
            torch.optim,
            rng.choice(
                [
                    "Adadelta",
                    "Adagrad",
                    "Adam",
                    "AdamW",
                    "Adamax",
                    "ASGD",
                    "NAdam",
                    "RAdam",
                    "RMSprop",
                    "Rprop",
                    "SGD",
                    "Adafactor",
                ]
            ),
        )
        words = inspect.signature(cls.__init__).parameters
        given = {
            word: True
            for word in (
                "amsgrad",
                "nesterov",
                "centered",
                "maximize",
                "foreach",
                "capturable",
                "decoupled_weight_decay",
            )
            if word in words and word not in ("nesterov", "capturable") and rng.random() < 0.3
        }
        given |= {"momentum": 0.9} if "momentum" in words and rng.random() < 0.5 else {}
        groups = rng.choice(
            [
                net.parameters(),
                [
                    {"params": net[0].parameters(), "lr": 0.5, "name": "a"},
                    {"params": net[1].parameters(), "tags": {"x"}},
                ],
                net.named_parameters(),
            ]
        )
        made = cls(
            groups,
            lr=rng.choice([0.1, torch.tensor(0.1)])
            if cls.__name__ in ("Adam", "AdamW") and not given.get("foreach")
            else 0.1,
            **given,
        )
        net(torch.ones(1, 3)).sum().backward()
        made.step()
        return made

    def scheduler() -> Any:
        of, module = optimizer(), torch.optim.lr_scheduler
        return rng.choice([lambda: module.StepLR(of, 3, 0.2), lambda: module.ReduceLROnPlateau(of, rng.choice(["min", "max"]), patience=3), lambda: module.CosineAnnealingLR(of, 9, 1e-5), lambda: module.OneCycleLR(of, 0.1, 20, anneal_strategy=rng.choice(["cos", "linear"])), lambda: module.SequentialLR(of, [module.LinearLR(of), module.CosineAnnealingLR(of, 5)], [2]), lambda: module.ConstantLR(of, 0.5, 2), lambda: module.CyclicLR(of, 0.1, 1, mode=rng.choice(["triangular", "triangular2", "exp_range"]), cycle_momentum=False), lambda: module.ExponentialLR(of, 0.5), lambda: torch.optim.swa_utils.SWALR(of, 0.1)])()  # fmt: skip

    def tensor() -> Any:
        kind = rng.choice(
            [
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.uint8,
                torch.bool,
                torch.complex64,
                torch.float8_e5m2,
                torch.int8,
            ]
        )
        made = torch.ones(tuple(rng.randrange(4) for _ in range(rng.randrange(4)))).to(kind)
        return rng.choice(
            [
                made,
                made.t() if made.dim() == 2 else made,
                nn.Parameter(made, requires_grad=False),
                torch.eye(3).to_sparse(),
                torch.eye(3).to_sparse_csc(),
                made.expand(2, *made.shape),
                torch.ones(4)[1:3],
            ]
        )

    def distribution() -> Any:
        module = torch.distributions
        one, two = torch.ones(2), torch.ones(2) / 2
        return rng.choice([lambda: module.Beta(one, one), lambda: module.Bernoulli(two), lambda: module.Gamma(one, one), lambda: module.MultivariateNormal(one, torch.eye(2)), lambda: module.Dirichlet(one), lambda: module.LogNormal(one, one), lambda: module.Laplace(one, one), lambda: module.StudentT(one), lambda: module.Poisson(one), lambda: module.MixtureSameFamily(module.Categorical(one), module.Normal(one, one)), lambda: module.TransformedDistribution(module.Normal(one, one), [module.SigmoidTransform()]), lambda: module.OneHotCategorical(two)])()  # fmt: skip

    def make() -> tuple[str, Any]:
        kind = rng.choice(
            [
                "module",
                "module",
                "module",
                "optimizer",
                "scheduler",
                "checkpoint",
                "checkpoint",
                "checkpoint",
                "tensors",
                "distribution",
                "data",
            ]
        )
        if kind == "module":
            return kind, _layer(drawn)
        if kind == "optimizer":
            return kind, rng.choice([optimizer(), {"optimizer": optimizer().state_dict(), "info": drawn.plain()}])
        if kind == "scheduler":
            return kind, rng.choice([scheduler, lambda: {"scheduler": scheduler().state_dict()}])()
        if kind == "tensors":
            return kind, rng.choice(
                [
                    lambda: [tensor() for _ in range(4)],
                    lambda: {"a": tensor(), "b": {"c": tensor()}},
                    lambda: {tensor().numel(): tensor(), ("a", 1): tensor()},
                    tensor,
                ]
            )()
        if kind == "distribution":
            return kind, distribution()
        if kind == "data":
            module = torch.utils.data
            return kind, rng.choice(
                [
                    lambda: module.TensorDataset(torch.ones(3)),
                    lambda: module.ConcatDataset([module.TensorDataset(torch.ones(3))]),
                    lambda: module.Subset(module.TensorDataset(torch.ones(3)), [0, 2]),
                    lambda: module.RandomSampler([1, 2]),
                    lambda: module.BatchSampler(module.SequentialSampler([1, 2]), 2, True),
                    lambda: nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1), [3, 2]),
                    lambda: torch.Generator().manual_seed(5),
                ]
            )()
        state = _layer(drawn).state_dict()
        return kind, rng.choice([
            lambda: {"model": state, "optimizer": optimizer().state_dict(), "scheduler": scheduler().state_dict(), **{name: drawn.plain() for name in rng.sample(NAMES, 5)}},
            lambda: {"state_dict": collections.OrderedDict(state), "args": argparse.Namespace(**{name: drawn.plain() for name in rng.sample(NAMES, 4)}), "rng": [torch.get_rng_state(), random.getstate()]},
            lambda: {"ema": state, "step": torch.tensor(3), "history": [drawn.plain() for _ in range(5)]},
            lambda: (state, drawn.plain()), lambda: {**state, "meta": drawn.plain()},
        ])()  # fmt: skip

    drawn.several(make, 3 * COUNT, *ways)


@section
def torchmetrics(drawn: Drawn) -> None:
    import torch
    import torchmetrics as library

    classes = [each for each in vars(library).values() if isinstance(each, type) and issubclass(each, library.Metric)]

    def make() -> tuple[str, Any]:
        cls = drawn.rng.choice(classes)
        given = {"task": "multiclass", "num_classes": 3} if "task" in inspect.signature(cls.__new__).parameters else {}
        metric = cls(**given)
        return cls.__name__, drawn.rng.choice([metric, {"metric": metric, "state": torch.ones(1)}])

    drawn.several(make, 12, "torch")


# ------------------------------------------------------------------------------------------------- arguments, configurations


def _field(drawn: Drawn, kind: Any, default: Any) -> Any:
    """Draw the value of a field of a dataclass. Raises LookupError if its type says too little."""
    rng = drawn.rng
    if isinstance(default, enum.Enum):
        return rng.choice(list(type(default)))
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + rng.randrange(4)
    if isinstance(default, float):
        return default * rng.choice([0.5, 1.0]) + rng.choice([0.0, 0.01])
    parts = typing.get_args(kind) if not isinstance(kind, str) else ()
    if "Literal" in str(kind) and parts:
        return rng.choice(parts)
    if "dict" in str(kind):
        return {"a": 1, "b": "c"}
    if "list" in str(kind) or "List" in str(kind):
        return ["x", "y"]
    if "str" in str(kind):
        return "text"
    raise LookupError(kind)


def _filled(drawn: Drawn, cls: Any, fixed: dict[str, Any], chance: float = 0.12) -> Any:
    """Draw an object of a dataclass: fields with other values than their defaults, those that it takes together."""
    import dataclasses

    for _ in range(30):
        given = dict(fixed)
        for field in dataclasses.fields(cls):
            if field.init and field.name not in fixed and drawn.rng.random() < chance:
                with contextlib.suppress(LookupError, TypeError, ValueError):
                    given[field.name] = _field(drawn, field.type, field.default)
        with contextlib.suppress(Exception):
            return cls(**given)
    return cls(**fixed)


@section
def transformers(drawn: Drawn) -> None:
    import torch
    import transformers as library

    rng = drawn.rng
    fixed = {"output_dir": "/tmp/out", "report_to": []}
    names = sorted(library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES.values())
    small = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
    }

    def config() -> Any:
        made = getattr(library, rng.choice(names))()
        for name, value in rng.sample(list(vars(made).items()), min(6, len(vars(made)))):
            if type(value) in (bool, int, float) and not name.startswith("_"):
                setattr(made, name, type(value)(rng.choice([0, 1])))
        made.id2label = {0: "a", 1: "b"}
        return made

    def make() -> tuple[str, Any]:
        kind = rng.choice(
            [
                "args",
                "args",
                "args",
                "config",
                "config",
                "config",
                "generation",
                "state",
                "model",
                "optimizer",
                "output",
                "quantized",
            ]
        )
        if kind == "args":
            cls = rng.choice([library.TrainingArguments, library.TrainingArguments, library.Seq2SeqTrainingArguments])
            return kind, _filled(drawn, cls, fixed)
        if kind == "config":
            made = config()
            return f"{kind}-{type(made).__name__}", made
        if kind == "generation":
            return kind, library.GenerationConfig(
                **rng.choice(
                    [
                        {"num_beams": 3, "early_stopping": True},
                        {"do_sample": True, "top_k": 5, "temperature": 0.5},
                        {"max_new_tokens": 5, "bad_words_ids": [[1]], "forced_bos_token_id": 2},
                        {"penalty_alpha": 0.5, "stop_strings": ["a"]},
                    ]
                )
            )
        if kind == "state":
            state = library.TrainerState(
                epoch=rng.random(),
                global_step=rng.randrange(99),
                log_history=[{"loss": rng.random(), "step": at} for at in range(3)],
                best_metric=0.5,
                total_flos=1e9,
            )
            return kind, rng.choice(
                [
                    state,
                    library.TrainerControl(should_save=True),
                    library.EvalPrediction(torch.ones(2).numpy(), torch.ones(2).numpy()),
                    library.trainer_utils.EvalLoopOutput(None, None, {"a": 1.0}, 3),
                ]
            )
        if kind == "model":
            name = rng.choice(
                [
                    "Bert",
                    "Roberta",
                    "Llama",
                    "Mistral",
                    "Gemma",
                    "Qwen2",
                    "Electra",
                    "DistilBert",
                    "OPT",
                    "Phi",
                    "StableLm",
                    "GPTNeoX",
                    "Olmo",
                    "Cohere",
                ]
            )
            model = getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**small))
            return f"{kind}-{name}", rng.choice(
                [
                    {"state": model.state_dict(), "config": model.config},
                    {"config": model.config.to_dict(), "model": model.state_dict()},
                ]
            )
        if kind == "optimizer":
            optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)])
            return kind, {
                "scheduler": rng.choice(
                    [
                        library.get_cosine_schedule_with_warmup,
                        library.get_linear_schedule_with_warmup,
                        library.get_polynomial_decay_schedule_with_warmup,
                    ]
                )(optimizer, 2, 9).state_dict(),
                "optimizer": optimizer.state_dict(),
            }
        if kind == "output":
            module = library.modeling_outputs
            return kind, rng.choice(
                [
                    module.BaseModelOutput(torch.ones(1, 2)),
                    module.SequenceClassifierOutput(
                        loss=torch.ones(1), logits=torch.ones(1, 2), hidden_states=(torch.ones(1),)
                    ),
                    module.BaseModelOutputWithPooling(torch.ones(1), torch.ones(1)),
                    library.BatchEncoding({"input_ids": [[1, 2]]}),
                    library.BatchFeature({"pixel_values": torch.ones(1, 2)}),
                ]
            )
        return kind, rng.choice(
            [
                lambda: library.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["a"]),
                lambda: library.AwqConfig(bits=4),
                lambda: library.HqqConfig(nbits=4),
                lambda: library.QuantoConfig(weights="int4"),
                library.FineGrainedFP8Config,
                library.VptqConfig,
            ]
        )()

    drawn.several(make, 3 * COUNT, "torch", "pickle4")


def _dataclasses(drawn: Drawn, modules: list[Any], ending: str, fixed: dict[str, Any], count: int) -> None:
    classes = [
        value
        for module in modules
        for name, value in sorted(vars(module).items())
        if name.endswith(ending) and isinstance(value, type) and hasattr(value, "__dataclass_fields__")
    ]

    def make() -> tuple[str, Any]:
        cls = drawn.rng.choice(classes)
        return cls.__name__, _filled(
            drawn, cls, {key: value for key, value in fixed.items() if key in cls.__dataclass_fields__}
        )

    drawn.several(make, count, "torch", "pickle4")


@section
def peft(drawn: Drawn) -> None:
    import peft as library

    _dataclasses(
        drawn, [library], "Config", {"target_modules": ["q", "v"], "total_step": 9, "num_virtual_tokens": 3}, 12
    )


@section
def trl(drawn: Drawn) -> None:
    import trl as library

    for name in library.__all__ if hasattr(library, "__all__") else ():
        with contextlib.suppress(Exception):
            getattr(library, name)
    _dataclasses(drawn, [library], "Config", {"output_dir": "/tmp/out", "report_to": []}, 12)


@section
def accelerate(drawn: Drawn) -> None:
    from accelerate import utils

    for ending in ("Kwargs", "Plugin", "Configuration"):
        _dataclasses(drawn, [utils, utils.dataclasses], ending, {}, 4)


@section
def lightning(drawn: Drawn) -> None:
    import lightning.pytorch as pl
    import torch

    rng = drawn.rng

    class Net(pl.LightningModule):
        def __init__(self, **hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters(*([hparams] if rng.random() < 0.5 else []))
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            cls = getattr(torch.optim, rng.choice(["SGD", "Adam", "RMSprop"]))
            return cls(self.parameters(), 0.1)

    for number in range(6):
        extra = rng.sample(
            [
                pl.callbacks.ModelCheckpoint(save_top_k=1),
                pl.callbacks.EarlyStopping("loss", check_on_train_epoch_end=False, strict=False),
                pl.callbacks.Timer("00:01:00:00"),
                pl.callbacks.GradientAccumulationScheduler({1: 2}),
                pl.callbacks.LambdaCallback(),
            ],
            2,
        )
        trainer = pl.Trainer(
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            default_root_dir=drawn.directory / "..",
            callbacks=extra,
        )
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2)
        trainer.fit(Net(**{name: drawn.plain() for name in rng.sample(NAMES, 4)}), data)
        drawn.save(f"{number}.ckpt", lambda path, trainer=trainer: trainer.save_checkpoint(path))


@section
def omegaconf(drawn: Drawn) -> None:
    from omegaconf import OmegaConf

    rng = drawn.rng

    def tree(depth: int = 0) -> Any:
        if depth < 3 and rng.random() < 0.6:
            parts = [tree(depth + 1) for _ in range(3)]
            return rng.choice([parts, dict(zip(rng.sample(NAMES, 3), parts, strict=True))])
        return rng.choice([1, 2.5, "x", None, True, "???", b"x", pathlib.Path("/a")])

    drawn.several(lambda: ("config", OmegaConf.create({"a": tree(), "b": tree(), "c": "${a}"})), 6, "torch", "pickle4")


# ------------------------------------------------------------------------------------------------------------- others


@section
def statsmodels(drawn: Drawn) -> None:
    import numpy as np
    import pandas as pd
    import statsmodels.api as sm
    import statsmodels.formula.api as formula

    rng = drawn.rng
    x = np.random.rand(50, 2)
    y = np.abs(x.sum(1) + 0.1 * np.random.rand(50))
    frame = pd.DataFrame({"y": y, "a": x[:, 0], "b": x[:, 1], "g": np.arange(50) % 2, "w": list("uv") * 25})

    def make() -> tuple[str, Any]:
        families, trend = sm.families, rng.choice(["n", "c", "ct"])
        return rng.choice([
            lambda: ("glm", sm.GLM(y, x, family=rng.choice([families.Gaussian, families.Poisson, families.InverseGaussian, families.Tweedie])()).fit()), lambda: ("ols", sm.OLS(frame["y"], sm.add_constant(frame[["a", "b"]])).fit(cov_type=rng.choice(["nonrobust", "HC1"]))),
            lambda: ("formula", formula.ols(rng.choice(["y ~ a", "y ~ a + C(w)", "y ~ a:b + I(a)", "np.sqrt(y) ~ b"]), frame).fit()), lambda: ("glmformula", formula.glm("g ~ a + b", frame, family=families.Binomial()).fit()), lambda: ("arima", sm.tsa.ARIMA(y, order=(rng.randrange(2), 0, 1), trend=trend).fit()),
            lambda: ("ets", sm.tsa.ExponentialSmoothing(y, trend=rng.choice([None, "add"])).fit()), lambda: ("robust", sm.RLM(y, x, M=rng.choice([sm.robust.norms.HuberT, sm.robust.norms.TukeyBiweight])()).fit()), lambda: ("autoreg", sm.tsa.AutoReg(y, 2, trend=trend).fit()), lambda: ("varmax", sm.tsa.VAR(x).fit(2, trend="c")), lambda: ("quant", sm.QuantReg(y, x).fit(0.3)),
            lambda: ("poisson", sm.Poisson(np.arange(50) % 4, x).fit(disp=0)), lambda: ("tests", sm.stats.anova_lm(formula.ols("y ~ a", frame).fit())), lambda: ("kde", sm.nonparametric.KDEMultivariate(x, "cc")), lambda: ("factor", sm.Factor(np.random.rand(30, 4), 1).fit()),
        ])()  # fmt: skip

    drawn.several(make, 12)


@section
def gymnasium(drawn: Drawn) -> None:
    import numpy as np
    from gymnasium import spaces

    rng = drawn.rng

    def space(depth: int = 0) -> Any:
        makes: list[Callable[[], Any]] = [
            lambda: spaces.Box(
                np.float32(-1), np.float32(np.inf), (rng.randrange(1, 4),), rng.choice([np.float32, np.float64])
            ),
            lambda: spaces.Discrete(4, start=rng.randrange(3)),
            lambda: spaces.MultiBinary([2, 3]),
            lambda: spaces.MultiDiscrete([[2, 3], [4, 5]]),
            lambda: spaces.Text(3, min_length=1),
        ]
        if depth < 2:
            makes += [
                lambda: spaces.Dict({name: space(depth + 1) for name in NAMES[:2]}),
                lambda: spaces.Tuple([space(depth + 1)]),
                lambda: spaces.Sequence(space(depth + 1)),
            ]
        made = rng.choice(makes)()
        made.seed(rng.choice([None, 3]))
        return made

    drawn.several(lambda: ("space", space()), 8)


@section
def networkx(drawn: Drawn) -> None:
    import networkx as nx

    rng = drawn.rng

    def make() -> tuple[str, Any]:
        made = rng.choice(
            [
                lambda: nx.erdos_renyi_graph(6, 0.5),
                lambda: nx.gn_graph(6),
                lambda: nx.MultiDiGraph([(1, 2, "k")]),
                lambda: nx.balanced_tree(2, 2),
                nx.les_miserables_graph,
            ]
        )()
        made.graph["info"] = drawn.plain()
        made.add_node("n", value=drawn.plain(2))
        return "graph", made

    drawn.several(make, 6)


@section
def gensim(drawn: Drawn) -> None:
    from gensim import models
    from gensim.corpora import Dictionary

    rng = drawn.rng
    texts = [[rng.choice("abcdefg") for _ in range(6)] for _ in range(30)]
    words = Dictionary(texts)
    bags = [words.doc2bow(text) for text in texts]

    def make() -> tuple[str, Any]:
        return rng.choice([
            lambda: ("word2vec", models.Word2Vec(texts, vector_size=4, min_count=1, sg=rng.randrange(2), hs=1, negative=0)), lambda: ("lda", models.LdaModel(bags, 2, words, alpha=rng.choice(["auto", "symmetric"]))), lambda: ("fasttext", models.FastText(texts, vector_size=4, min_count=1, bucket=20)), lambda: ("tfidf", models.TfidfModel(bags, smartirs=rng.choice(["ltc", "nfn"]))),
            lambda: ("ensemble", models.LsiModel(bags, words, 2)), lambda: ("okapi", models.OkapiBM25Model(bags)), lambda: ("keyed", models.Word2Vec(texts, vector_size=4, min_count=1).wv), lambda: ("dictionary", words),
        ])()  # fmt: skip

    drawn.several(make, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("sections", nargs="*")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    asked.directory.mkdir(parents=True, exist_ok=True)
    if len(asked.sections) == 1:
        drawn = Drawn(asked.seed, asked.directory, asked.sections[0])
        for library in ("numpy.random", "torch"):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(library)
                (module.manual_seed if library == "torch" else module.seed)(asked.seed)
        try:
            SECTIONS[drawn.section](drawn)
        except ImportError as error:
            print("left out:", drawn.section, error)
        except Exception:
            print("failed:", drawn.section, traceback.format_exc(limit=2))
        print(drawn.section, drawn.count)
        return
    for name in asked.sections or SECTIONS:
        subprocess.run([sys.executable, __file__, str(asked.seed), str(asked.directory), name], check=False)


if __name__ == "__main__":
    main()
