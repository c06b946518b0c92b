"""Makes harmless files with the libraries that are installed, for the figures in docs/internals/scan.md.

    python scripts/scan/corpus.py PART DIRECTORY [SECTION …]

PART is `first`, on whose files the grammar was improved, or `last`, which was set aside until it was done. Both have the
same sections; `last` was made with other releases, and of other classes. `foreign` is of libraries that the grammar does
not have. A section whose library is missing is left out. Run it with the Python of an environment that has the libraries.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import fractions
import itertools
import os
import pathlib
import pickle
import random
import subprocess
import sys
import tempfile
import traceback
import uuid
import warnings
import zlib
from collections.abc import Callable
from typing import Any

# How an object is written, in turn.
WAYS = (
    "pickle5",
    "joblib0",
    "pickle4",
    "joblib3",
    "pickle2",
    "joblib-gzip",
    "pickle3",
    "joblib-xz",
    "joblib-lzma",
    "joblib-bz2",
)
Section = Callable[["Corpus"], None]
SECTIONS: dict[str, Section] = {}


class Corpus:
    """The directory of one part. `part` says which of two choices a section takes."""

    def __init__(self, part: str, directory: pathlib.Path, section: str) -> None:
        self.part, self.directory, self.section, self.count = part, directory, section, 0
        self._ways = itertools.cycle(WAYS)

    @property
    def is_first(self) -> bool:
        return self.part == "first"

    def mine(self, name: str) -> bool:
        """Whether a name falls into this part: about half of all names do."""
        return (zlib.crc32(name.encode()) % 2 == 0) == self.is_first

    def put(self, name: str, value: Any, *ways: str) -> None:
        """Write `value`, in the way whose turn it is, or in each of `ways`."""
        for way in ways or (next(self._ways),):
            self.save(
                f"{name}-{way}.{_SUFFIXES[way.rstrip('0123456789').partition('-')[0]]}",
                lambda path, way=way: written(value, path, way),
            )

    def save(self, name: str, write: Callable[[str], Any]) -> None:
        """Let `write` make a file."""
        path = self.directory / f"{self.section}-{name}"
        try:
            write(str(path))
            self.count += 1
        except Exception as error:
            print("not made:", path.name, repr(error)[:150])
            path.unlink(missing_ok=True)


_SUFFIXES = {"pickle": "pkl", "joblib": "joblib", "torch": "pt", "legacy": "pt"}


def written(value: Any, path: str, way: str) -> None:
    if way.startswith("pickle"):
        with open(path, "wb") as file:
            pickle.dump(value, file, int(way[6:]))
    elif way.startswith("joblib"):
        import joblib

        joblib.dump(value, path, compress=int(way[6:]) if way[6:].isdigit() else (way[7:], 3))
    else:
        import torch

        torch.save(value, path, _use_new_zipfile_serialization=way == "torch")


def section(make: Section) -> Section:
    SECTIONS[make.__name__.strip("_")] = make
    return make


def each(corpus: Corpus, cases: dict[str, Callable[[], Any]], *ways: str, both: bool = False) -> None:
    """Write the objects that `cases` make: of this part, or all."""
    for name, make in cases.items():
        if both or corpus.mine(name):
            try:
                value = make()
            except Exception as error:
                print("not made:", corpus.section, name, repr(error)[:150])
                continue
            corpus.put(name, value, *ways)


@section
def sklearn(corpus: Corpus) -> None:
    import numpy as np
    from sklearn.base import clone
    from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, StratifiedKFold
    from sklearn.pipeline import FeatureUnion, make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
    from sklearn.utils import Bunch, all_estimators

    x, y = make_classification(60, 6, random_state=0)
    texts = ["a b c", "b c d", "a d e f"] * 20
    of = {
        "estimator": Ridge, "base_estimator": Ridge, "estimators": lambda: [("a", Ridge()), ("b", LogisticRegression())],
        "param_grid": lambda: {"C": [0.1, 1.0]}, "param_distributions": lambda: {"C": [0.1, 1.0]},
        "transformers": lambda: [("a", StandardScaler(), [0, 1])], "transformer_list": lambda: [("a", StandardScaler())],
        "steps": lambda: [("a", StandardScaler()), ("b", Ridge())],
    }  # fmt: skip
    for name, cls in all_estimators():
        if not corpus.mine(name):
            continue
        needed = getattr(cls, "_required_parameters", [])
        given = {word: of[word]() for word in needed if word in of}
        if "Search" in name or ("Classif" in name and "estimator" in given):
            given["estimator"] = LogisticRegression()
        try:
            model = cls(**given)
        except Exception as error:
            print("not made:", name, repr(error)[:100])
            continue
        for data in ((x, y), (np.abs(x), y), (x, np.stack([y, y], 1)), (y, y), (texts,), ([{"a": 1}] * 3,)):
            with contextlib.suppress(Exception):
                model = clone(model).fit(*data)
                break
        corpus.put(name, model)
    both = {
        "text": lambda: make_pipeline(CountVectorizer(), TfidfTransformer(), LogisticRegression()).fit(texts, y),
        "columns": lambda: ColumnTransformer([("a", make_pipeline(SimpleImputer(), StandardScaler()), [0, 1]), ("b", OneHotEncoder(handle_unknown="ignore"), [2])], remainder="passthrough").fit(np.round(x)),
        "union": lambda: FeatureUnion([("a", StandardScaler()), ("b", FunctionTransformer(np.log1p))]).fit(x),
        "grid": lambda: GridSearchCV(RandomForestClassifier(5), {"max_depth": [2, 3]}, cv=StratifiedKFold(2), scoring="f1").fit(x, y),
        "random": lambda: RandomizedSearchCV(make_pipeline(StandardScaler(), LogisticRegression()), {"logisticregression__C": [1, 2, 3]}, n_iter=2).fit(x, y),
        "process": lambda: GaussianProcessRegressor(kernels.RBF() + kernels.WhiteKernel() * kernels.ConstantKernel(2.0)).fit(x, y),
        "target": lambda: TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1).fit(x, y),
        "bunch": lambda: Bunch(model=Ridge().fit(x, y), names=["a"], scores=np.ones(3)),
        "dict": lambda: {"model": RandomForestClassifier(3).fit(x, y), "features": list("abc"), "date": datetime.date(2024, 1, 2), "metrics": {"f1": np.float64(0.5)}},
        "tuple": lambda: (StandardScaler().fit(x), LogisticRegression().fit(x, y), np.arange(3)),
    }  # fmt: skip
    each(corpus, both)
    frame = _frame()
    if frame is not None:
        numbers = frame[["a", "b"]].fillna(0)
        corpus.put("frame", make_pipeline(StandardScaler(), Ridge()).fit(numbers, frame["a"]))
        corpus.put(
            "encoded", ColumnTransformer([("a", OneHotEncoder(), ["c"]), ("b", "passthrough", ["a"])]).fit(frame)
        )


def _frame() -> Any:
    try:
        import pandas as pd
    except ImportError:
        return None
    return pd.DataFrame(
        {
            "a": [1, 2, 3],
            "b": [1.0, 2.5, None],
            "c": list("xyz"),
            "d": pd.date_range("2020", periods=3),
            "e": pd.Categorical(["a", "b", "a"]),
        }
    )


@section
def pandas(corpus: Corpus) -> None:
    import numpy as np
    import pandas as pd

    frame = _frame()
    cases = {
        "frame": lambda: frame, "series": lambda: frame["a"], "text": lambda: frame["c"], "by_date": lambda: frame.set_index("d"),
        "levels": lambda: frame.set_index(["a", "c"]), "pivot": lambda: frame.pivot_table("b", "a", "c"), "time": lambda: frame.set_index("d").tz_localize("US/Eastern", level=0),
        "stamp": lambda: pd.Timestamp("2021-03-04 05:06", tz="Europe/Paris"), "delta": lambda: pd.Timedelta("3h"), "period": lambda: pd.Period("2020-02", "M"),
        "interval": lambda: pd.Interval(0, 2), "intervals": lambda: pd.cut(pd.Series([1, 2, 3, 4]), 2), "int64": lambda: pd.Series([1, None], dtype="Int64"),
        "float64": lambda: pd.Series([1.5, None], dtype="Float64"), "string": lambda: pd.Series(["a", None], dtype="string"), "boolean": lambda: pd.Series([True, None], dtype="boolean"),
        "sparse": lambda: pd.DataFrame({"s": pd.arrays.SparseArray([0, 0, 1])}), "grouped": frame.groupby("c")["a"].sum, "described": frame.describe,
        "corr": frame[["a", "b"]].corr, "empty": pd.DataFrame, "dates": lambda: pd.date_range("2020", periods=4, freq="B"), "hours": lambda: pd.timedelta_range("1h", periods=3),
        "quarters": lambda: pd.period_range("2020", periods=4, freq="Q"), "ordered": lambda: pd.Series(pd.Categorical(["lo", "hi"], ["lo", "hi"], ordered=True)),
        "offset": lambda: [pd.offsets.BDay(3), pd.offsets.MonthEnd(), pd.offsets.QuarterBegin(startingMonth=2), pd.offsets.CustomBusinessDay()],
        "dtypes": lambda: frame.dtypes, "records": lambda: frame.to_dict("records"), "wide": lambda: pd.DataFrame(np.random.rand(50, 20), columns=[f"c{n}" for n in range(20)]),
        "object": lambda: pd.Series([{"a": 1}, [2], None, "x"]), "attrs": lambda: _attrs(frame), "resampled": lambda: frame.set_index("d")["a"].resample("D").mean(),
        "dict": lambda: {"train": frame, "test": frame.iloc[:1], "split": 0.8}, "nested": lambda: pd.DataFrame({"x": [np.arange(3), np.ones(2)]}),
        "float32": lambda: frame[["a", "b"]].astype("float32"), "nat": lambda: pd.Series([pd.NaT, pd.Timestamp("2020")]), "zone": lambda: pd.Series(pd.date_range("2020", periods=2, tz="Asia/Tokyo")),
    }  # fmt: skip
    each(corpus, cases, both=True)
    for name in ("frame", "levels", "time", "string"):
        for compression in ("gzip", "bz2", "xz") if corpus.is_first else ("zip", "gzip"):
            corpus.save(
                f"{name}.pkl.{compression}",
                lambda path, n=name, c=compression: cases[n]().to_pickle(path, compression=c),
            )


def _attrs(frame: Any) -> Any:
    frame = frame.copy()
    frame.attrs["source"] = "survey"
    return frame


@section
def numpy(corpus: Corpus) -> None:
    import numpy as np

    cases = {
        "array": lambda: np.arange(12).reshape(3, 4), "fortran": lambda: np.asfortranarray(np.random.rand(4, 3)), "big": lambda: np.random.rand(100, 100), "text": lambda: np.array(["a", "bcd"]),
        "records": lambda: np.zeros(3, [("x", "f4", (2,)), ("y", "S5")]), "recarray": lambda: np.rec.array([(1, "a")], names="n,s"), "masked": lambda: np.ma.array([1.0, 2], mask=[0, 1]),
        "objects": lambda: np.array([{"a": 1}, "b", None], object), "dates": lambda: np.array(["2020-01", "2021-02"], "M8[M]"), "scalar": lambda: {"acc": np.float64(0.9), "n": np.int64(3), "b": np.bool_(True)},
        "generator": lambda: np.random.default_rng(3), "state": lambda: np.random.RandomState(3), "tuple_state": np.random.get_state, "philox": lambda: np.random.Generator(np.random.Philox(3)),
        "seeds": lambda: np.random.SeedSequence(8).spawn(2), "poly": lambda: np.polynomial.Chebyshev([1, 2, 3]), "poly1d": lambda: np.poly1d([1, 2]), "types": lambda: [np.float16, np.dtype("i4"), np.dtype("M8[ns]")],
        "half": lambda: np.ones(5, np.float16), "complex": lambda: np.ones(2, np.complex64), "zero": lambda: np.array(5), "matrix": lambda: np.matrix([[1, 2]]), "void": lambda: np.void(b"abc"),
        "detectron2": lambda: {"model": {f"backbone.res{n}.conv.weight": np.random.rand(4, 4).astype("f4") for n in range(9)}, "__author__": "Detectron2 Model Zoo", "matching_heuristics": True},
        "caffe2": lambda: {"blobs": {b"conv1_w": np.ones((2, 2), "f4"), "lr": 0.1}, "cfg": "MODEL:\n  TYPE: x"},
        "smpl": lambda: {"v_template": np.random.rand(10, 3), "J_regressor": np.eye(3), "kintree_table": np.zeros((2, 24), np.uint32), "bs_type": "lrotmin"},
        "nerf_poses": lambda: {"poses": np.eye(4)[None], "hwf": [np.float32(8), np.float32(8), 5.5], "i_split": [np.arange(3), np.arange(2)]},
    }  # fmt: skip
    each(corpus, cases, both=True)
    corpus.save("saved.npy", lambda path: np.save(path, np.arange(5)))
    corpus.save("objects.npy", lambda path: np.save(path, np.array([{"a": 1}, None], object), allow_pickle=True))
    corpus.save("saved.npz", lambda path: np.savez(path, a=np.arange(5), b=np.ones(2)))
    corpus.save("objects.npz", lambda path: np.savez_compressed(path, a=np.array([{"a": np.ones(2)}], object)))


@section
def python(corpus: Corpus) -> None:
    import array
    import zoneinfo
    from types import SimpleNamespace

    utc = datetime.timezone.utc
    cases = {
        "args": lambda: argparse.Namespace(lr=0.1, betas=(0.9, 0.99), device="cuda", out=pathlib.Path("/tmp/x"), seed=None),
        "vocabulary": lambda: {word: number for number, word in enumerate(["<pad>", "<s>", "a", "b"])}, "counter": lambda: collections.Counter("abracadabra"),
        "nested": lambda: collections.defaultdict(list, a=[1]), "counts": lambda: collections.defaultdict(int, a=1), "deep": lambda: collections.defaultdict(dict, a={"b": 1}),
        "ordered": lambda: collections.OrderedDict(a=collections.OrderedDict(b=1)), "queue": lambda: collections.deque(range(9), maxlen=5), "date": lambda: datetime.date(2024, 5, 6),
        "stamps": lambda: [datetime.datetime(2024, 1, 2, 3, tzinfo=utc), datetime.datetime(2024, 1, 2), datetime.timedelta(1, 2), datetime.time(3, tzinfo=utc)],
        "zone": lambda: datetime.datetime(2024, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), "offset": lambda: datetime.timezone(datetime.timedelta(hours=2), "CEST"),
        "money": lambda: [decimal.Decimal("12.50"), decimal.Decimal("NaN"), fractions.Fraction(22, 7)], "paths": lambda: {"root": pathlib.PosixPath("/data"), "win": pathlib.PureWindowsPath("C:/x")},
        "uuid": lambda: {"run": uuid.uuid4()}, "space": lambda: SimpleNamespace(a=1, b=SimpleNamespace(c="d")), "array": lambda: array.array("f", [1, 2]), "random": lambda: random.Random(5),
        "random_state": random.getstate, "sets": lambda: {"a": {1, 2}, "b": frozenset("xy")}, "bytes": lambda: {"a": b"abc", "b": bytearray(b"de")}, "complex": lambda: [1j, range(3), slice(1, 5), ...],
        "history": lambda: [{"epoch": n, "loss": 1 / (n + 1), "when": datetime.datetime(2024, 1, n + 1)} for n in range(20)], "types": lambda: {"a": int, "b": str, "c": dict, "d": list},
        "cifar": lambda: {b"batch_label": b"testing batch 1 of 1", b"labels": [3, 8], b"filenames": [b"cat_s_000907.png"]}, "long": lambda: {"n": 10**40, "m": -(10**30)},
        "error": lambda: {"failed": ValueError("no such file", 3)}, "chain": lambda: collections.ChainMap({"a": 1}, {"b": 2}), "graph": _cycle,
    }  # fmt: skip
    each(corpus, cases, "pickle2", "pickle4" if corpus.is_first else "pickle5", both=True)


def _cycle() -> Any:
    node: dict[str, Any] = {"name": "root", "children": []}
    node["children"].append({"name": "leaf", "parent": node})
    return node


@section
def scipy(corpus: Corpus) -> None:
    import numpy as np
    from scipy import interpolate, optimize, signal, sparse, spatial, stats
    from scipy.cluster import hierarchy

    x = np.arange(8.0)
    points = np.random.rand(20, 2)
    for kind in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok"):
        for of in ("matrix", "array"):
            if corpus.mine(f"{kind}_{of}"):
                corpus.put(f"{kind}_{of}", getattr(sparse, f"{kind}_{of}")(np.eye(4)))
    cases = {
        "kde": lambda: stats.gaussian_kde(np.random.rand(20)), "norm": lambda: stats.norm(1, 2), "gamma": lambda: stats.gamma(2.0), "beta": lambda: stats.beta(1, 2, loc=3), "poisson": lambda: stats.poisson(3),
        "t": lambda: stats.t(5), "lognorm": lambda: stats.lognorm(0.5), "uniform": lambda: stats.uniform(0, 1), "randint": lambda: stats.randint(1, 9), "mvn": lambda: stats.multivariate_normal([0, 0], np.eye(2)),
        "dist": lambda: {"C": stats.loguniform(1e-3, 1e2), "n": stats.randint(1, 5)}, "rotation": lambda: spatial.transform.Rotation.from_euler("x", 30, degrees=True),
        "kdtree": lambda: spatial.KDTree(points), "ckdtree": lambda: spatial.cKDTree(points), "hull": lambda: spatial.ConvexHull(points).points, "interp1d": lambda: interpolate.interp1d(x, x**2),
        "cubic": lambda: interpolate.interp1d(x, x, kind="cubic"), "spline": lambda: interpolate.CubicSpline(x, x), "pchip": lambda: interpolate.PchipInterpolator(x, x),
        "akima": lambda: interpolate.Akima1DInterpolator(x, x), "univariate": lambda: interpolate.UnivariateSpline(x, x), "bspline": lambda: interpolate.make_interp_spline(x, x),
        "rbf": lambda: interpolate.RBFInterpolator(points, points[:, 0]), "grid": lambda: interpolate.RegularGridInterpolator((x, x), np.outer(x, x)), "nearest": lambda: interpolate.NearestNDInterpolator(points, points[:, 0]),
        "minimum": lambda: optimize.minimize(_square, [1.0, 2.0]), "root": lambda: optimize.root_scalar(_square_of, bracket=(-1, 2)), "linear": lambda: stats.linregress(x, x), "ttest": lambda: stats.ttest_ind(x, x + 1),
        "linkage": lambda: hierarchy.linkage(points), "filter": lambda: signal.butter(3, 0.2, output="sos"), "lti": lambda: signal.TransferFunction([1.0], [1.0, 2.0]), "tck": lambda: interpolate.splrep(x, x),
        "bounds": lambda: optimize.Bounds([0], [1]), "sobol": lambda: stats.qmc.Sobol(2, seed=1), "mode": lambda: stats.mode(x), "pearson": lambda: stats.pearsonr(x, x + x % 2),
    }  # fmt: skip
    each(corpus, cases)


def _square(x: Any) -> Any:
    return (x**2).sum()


def _square_of(x: float) -> float:
    return x**2 - 1


@section
def torch(corpus: Corpus) -> None:
    import torch
    from torch import nn

    ways = ("torch", "legacy", "pickle2") if corpus.is_first else ("torch", "legacy", "pickle4")
    modules = {
        "linear": lambda: nn.Linear(3, 2), "conv": lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU(inplace=True)), "conv3d": lambda: nn.ConvTranspose3d(1, 2, 2), "rnn": lambda: nn.RNN(2, 3),
        "lstm": lambda: nn.LSTM(2, 3, 2, bidirectional=True, dropout=0.1), "gru": lambda: nn.GRUCell(2, 3), "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True), "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"), 2),
        "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16), "embedding": lambda: nn.EmbeddingBag(5, 3), "norm": lambda: nn.ModuleDict({"a": nn.LayerNorm(3), "b": nn.RMSNorm(3), "c": nn.InstanceNorm2d(2, affine=True)}), "dropout": lambda: nn.Sequential(nn.Dropout(0.1), nn.Softmax(-1), nn.GELU()),
        "pool": lambda: nn.ModuleList([nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.PixelShuffle(2)]), "loss": lambda: nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1), "bce": lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)),
        "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "old_norm": lambda: nn.utils.weight_norm(nn.Conv1d(1, 1, 2)), "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)),
        "pruned": lambda: _pruned(nn.Linear(3, 3)), "parameters": lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.ParameterList([torch.ones(1)])}), "lazy": lambda: nn.LazyLinear(3), "bilinear": lambda: nn.Bilinear(2, 3, 4), "prelu": lambda: nn.Sequential(nn.PReLU(), nn.Hardswish(), nn.SELU(), nn.Unfold(2)),
        "average": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1)), "buffers": lambda: _buffered(nn.Linear(1, 1)), "quantized": lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4))),
    }  # fmt: skip
    for name, make in modules.items():
        if corpus.mine(name):
            corpus.put(f"module-{name}", make(), next(itertools.islice(ways, zlib.crc32(name.encode()) % 3, None)))
    optimizers = "Adadelta Adagrad Adam AdamW Adamax ASGD LBFGS NAdam RAdam RMSprop Rprop SGD SparseAdam Muon Adafactor"
    for name in optimizers.split():
        if hasattr(torch.optim, name):
            optimizer = _stepped(getattr(torch.optim, name))
            corpus.put(f"optimizer-{name}", optimizer, "torch" if corpus.mine(name) else "legacy")
            corpus.put(f"optimizer_state-{name}", {"optimizer": optimizer.state_dict(), "epoch": 3}, "torch")
    optimizer = torch.optim.SGD(
        [{"params": [torch.ones(1, requires_grad=True)], "lr": 0.5, "name": "a"}], lr=0.1, momentum=0.9
    )
    schedule = torch.optim.lr_scheduler
    schedulers = {
        "step": lambda: schedule.StepLR(optimizer, 2), "multi": lambda: schedule.MultiStepLR(optimizer, [2, 5]), "cosine": lambda: schedule.CosineAnnealingLR(optimizer, 5), "restarts": lambda: schedule.CosineAnnealingWarmRestarts(optimizer, 5),
        "plateau": lambda: schedule.ReduceLROnPlateau(optimizer), "one": lambda: schedule.OneCycleLR(optimizer, 0.1, total_steps=9), "cyclic": lambda: schedule.CyclicLR(optimizer, 0.1, 1), "exp": lambda: schedule.ExponentialLR(optimizer, 0.9),
        "poly": lambda: schedule.PolynomialLR(optimizer), "sequential": lambda: schedule.SequentialLR(optimizer, [schedule.ConstantLR(optimizer), schedule.LinearLR(optimizer)], [2]), "chained": lambda: schedule.ChainedScheduler([schedule.StepLR(optimizer, 2)]),
    }  # fmt: skip
    each(corpus, {f"scheduler-{name}": make for name, make in schedulers.items()}, "torch", both=True)
    each(
        corpus,
        {
            f"scheduler_state-{name}": (lambda make=make: {"scheduler": make().state_dict()})
            for name, make in schedulers.items()
        },
        "legacy",
    )
    tensors = {
        "sparse": lambda: torch.eye(3).to_sparse(), "csr": lambda: torch.eye(3).to_sparse_csr(), "quantized": lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8), "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn), "complex": lambda: torch.ones(2) * 1j, "parameter": lambda: nn.Parameter(torch.ones(2)), "meta": lambda: torch.ones(2, device="meta"), "attribute": lambda: _attributed(torch.ones(2)),
        "random": lambda: {"cpu": torch.get_rng_state(), "generator": torch.Generator().manual_seed(3), "python": random.getstate()}, "size": lambda: [torch.Size([1, 2]), torch.device("cuda:1"), torch.float16, torch.channels_last, torch.strided],
        "packed": lambda: nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)]), "hooked": lambda: _hooked(torch.ones(2, requires_grad=True)), "distribution": lambda: torch.distributions.Normal(torch.zeros(2), torch.ones(2)), "named": lambda: torch.ones(2, 3).rename("a", "b"),
        "bits": lambda: torch.ones(2, dtype=torch.uint8), "subclass": nn.UninitializedParameter, "categorical": lambda: torch.distributions.Categorical(logits=torch.ones(3)), "mixture": lambda: torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1),
        "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(3), torch.zeros(3)), "split": lambda: torch.utils.data.random_split(torch.utils.data.TensorDataset(torch.ones(4)), [2, 2]), "sampler": lambda: torch.utils.data.WeightedRandomSampler([0.5, 0.5], 2), "scaler": lambda: torch.amp.GradScaler("cpu").state_dict(),
    }  # fmt: skip
    each(corpus, {f"tensor-{name}": make for name, make in tensors.items()}, *ways[:2])
    _torch_styles(corpus)


def _torch_styles(corpus: Corpus) -> None:
    """Checkpoints as well-known programs lay them out, without their code."""
    import numpy as np
    import torch
    from torch import nn

    state = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)).state_dict()
    optimizer = _stepped(torch.optim.AdamW).state_dict()
    args = argparse.Namespace(
        arch="resnet50",
        lr=0.1,
        epochs=[30, 60],
        data=pathlib.Path("/data"),
        distributed=False,
        world_size=1,
        gpu=None,
        betas=(0.9, 0.98),
    )
    styles = {
        "imagenet": {"epoch": 3, "arch": "resnet50", "state_dict": collections.OrderedDict(state), "best_acc1": torch.tensor(71.2), "optimizer": optimizer, "args": args},
        "fairseq": {"args": args, "model": state, "criterion": None, "optimizer_history": [{"criterion_name": "x", "num_updates": 3, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": None}}], "extra_state": {"train_iterator": {"epoch": 2, "version": 2}, "val_loss": 3.5, "metrics": [("default", {"loss": 1})]}, "last_optimizer_state": optimizer, "cfg": None, "task_state": {}},
        "rvc": {"weight": {k: v.half() for k, v in state.items()}, "config": [1025, 32, 192, [3, 7], "1"], "info": "200epoch", "sr": "40k", "f0": 1, "version": "v2"},
        "sovits": {"weight": collections.OrderedDict(state), "config": {"train": {"lr": 1e-4, "betas": [0.8, 0.99]}, "data": {"n_speakers": 2}}, "info": "e8_s200"},
        "gpt": {"weight": collections.OrderedDict(state), "config": {"data": {"max_sec": 54}, "model": {"vocab_size": 1025}}, "info": "GPT-e10"},
        "nerf": {"global_step": 200000, "network_fn_state_dict": state, "network_fine_state_dict": state, "optimizer_state_dict": optimizer},
        "kdiffusion": {"config": {"model": {"type": "image_v1", "sigma_data": 0.5}}, "model": state, "model_ema": state, "opt": optimizer, "sched": {"last_epoch": 5}, "epoch": 1, "step": 100, "gns_stats": {"ema": 0.1}, "ema_sched": {"max_value": 0.999}},
        "whisper": {"dims": {"n_mels": 80, "n_vocab": 51865}, "model_state_dict": state},
        "ema": {"shadow_params": list(state.values()), "decay": 0.999, "num_updates": 10, "collected_params": None},
        "nanogpt": {"model": state, "optimizer": optimizer, "model_args": {"n_layer": 2, "bias": False}, "iter_num": 100, "best_val_loss": torch.tensor(1.5), "config": {"device": "cuda"}},
        "diffusers_ti": {"<cat-toy>": torch.ones(4)}, "embedding": {"string_to_token": {"*": torch.tensor(265)}, "string_to_param": nn.ParameterDict({"*": torch.ones(1, 4)}), "name": "x", "step": 3, "sd_checkpoint": None},
        "hypernetwork": {768: (state, state), "step": 100, "name": "h", "layer_structure": [1, 2, 1], "activation_func": "relu", "optional_info": None}, "voices": torch.ones(3, 1, 256), "timm": {"epoch": 5, "arch": "vit", "state_dict": state, "optimizer": optimizer, "version": 2, "args": args, "amp_scaler": {"scale": 65536.0, "_growth_tracker": 3}, "metric": 81.5},
        "coqui": {"config": {"audio": {"sample_rate": 22050}}, "model": state, "optimizer": optimizer, "step": 7, "epoch": 1, "date": "July 4, 2023", "model_loss": 0.5}, "latent": {"samples": torch.ones(1, 4, 8, 8)}, "rl": {"actor": state, "replay": collections.deque([(np.ones(4), 1, 0.5)], maxlen=9), "rng": np.random.get_state()},
        "geometry": {"vertices": np.ones((3, 3)), "faces": torch.ones(2, 3).long(), "info": collections.defaultdict(list, a=[1])}, "scaled": {"net": state, "when": datetime.datetime(2024, 2, 3), "commit": uuid.UUID(int=5), "path": pathlib.PosixPath("runs/1")}, "flows": [state, optimizer, {"lr": np.float32(0.1)}],
    }  # fmt: skip
    each(corpus, {f"style-{name}": (lambda value=value: value) for name, value in styles.items()}, both=False)
    each(
        corpus,
        {f"saved-{name}": (lambda value=value: value) for name, value in styles.items()},
        "torch" if corpus.is_first else "legacy",
        both=True,
    )


def _pruned(module: Any) -> Any:
    from torch.nn.utils import prune

    return prune.l1_unstructured(module, "weight", 0.5)


def _buffered(module: Any) -> Any:
    import torch

    module.register_buffer("steps", torch.zeros(1), persistent=False)
    module.requires_grad_(False)
    return module.eval()


def _attributed(tensor: Any) -> Any:
    tensor.note = {"a": 1}
    return tensor


def _hooked(tensor: Any) -> Any:
    tensor.grad = tensor.detach().clone()
    return tensor


def _stepped(make: Any) -> Any:
    import torch

    layer = torch.nn.Linear(2, 2, bias=False)
    optimizer = make(layer.parameters(), lr=0.1)

    def loss() -> Any:
        optimizer.zero_grad()
        value = layer(torch.ones(1, 2)).sum()
        value.backward()
        if make.__name__ == "SparseAdam":
            layer.weight.grad = layer.weight.grad.to_sparse()
        return value

    optimizer.step(loss)
    return optimizer


@section
def transformers(corpus: Corpus) -> None:
    import torch
    import transformers as library
    from transformers import GenerationConfig, Seq2SeqTrainingArguments, TrainingArguments

    common = {"output_dir": "/tmp/out", "report_to": []}
    arguments = {
        "plain": {}, "cosine": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_ratio": 0.1}, "optim": {"optim": "adamw_torch_fused", "optim_args": "a=1"}, "steps": {"save_strategy": "steps", "logging_steps": 5, "max_steps": 3, "save_total_limit": 2},
        "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, "hub": {"hub_strategy": "end", "hub_model_id": "a/b", "label_names": ["x"]}, "accelerator": {"accelerator_config": {"split_batches": True}}, "fsdp": {"fsdp": "", "torch_compile": False, "ddp_timeout": 60},
        "best": {"metric_for_best_model": "f1", "greater_is_better": True, "seed": 1, "data_seed": 2, "neftune_noise_alpha": 5.0}, "debug": {"debug": "underflow_overflow", "log_level": "info", "disable_tqdm": True, "run_name": "x"},
        "layers": {"optim": "galore_adamw", "optim_target_modules": ["attn", "mlp"]}, "bf16": {"bf16": True, "use_cpu": True, "bf16_full_eval": True}, "batch": {"per_device_train_batch_size": 2, "auto_find_batch_size": True, "group_by_length": True, "push_to_hub": False},
    }  # fmt: skip
    for name, given in arguments.items():
        corpus.save(
            f"{name}-training_args.bin",
            lambda path, given=given: torch.save(TrainingArguments(**common, **given), path),
        )
    corpus.save(
        "seq2seq-training_args.bin",
        lambda path: torch.save(
            Seq2SeqTrainingArguments(
                **common, predict_with_generate=True, generation_config=GenerationConfig(max_new_tokens=5)
            ),
            path,
        ),
    )
    configs = "Bert GPT2 Llama T5 Mistral Bart Roberta DistilBert Electra Albert XLNet Whisper ViT CLIP Qwen2 Gemma Falcon Mixtral Phi OPT GPTNeoX Bloom Deberta DebertaV2 Longformer Pegasus Wav2Vec2 Swin Blip Mamba"
    each(
        corpus, {f"config-{name}": (lambda name=name: getattr(library, f"{name}Config")()) for name in configs.split()}
    )
    small = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
    }
    models = {
        "bert": lambda: library.BertModel(library.BertConfig(**small)), "gpt2": lambda: library.GPT2LMHeadModel(library.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8)), "llama": lambda: library.LlamaForCausalLM(library.LlamaConfig(**small)),
        "t5": lambda: library.T5ForConditionalGeneration(library.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)), "roberta": lambda: library.RobertaForSequenceClassification(library.RobertaConfig(**small)), "distilbert": lambda: library.DistilBertModel(library.DistilBertConfig(vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=8)),
        "vit": lambda: library.ViTModel(library.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32, patch_size=16)), "qwen2": lambda: library.Qwen2ForCausalLM(library.Qwen2Config(**small, num_key_value_heads=2)), "electra": lambda: library.ElectraForTokenClassification(library.ElectraConfig(embedding_size=8, **small)),
    }  # fmt: skip
    each(corpus, {f"model-{name}": make for name, make in models.items()}, "torch")
    state = library.trainer_callback.TrainerState(epoch=1.5, global_step=10, log_history=[{"loss": 1.0, "step": 5}])
    optimizer = _stepped(torch.optim.AdamW)
    others = {
        "state": lambda: state, "control": library.trainer_callback.TrainerControl, "generation": lambda: GenerationConfig(max_length=9, eos_token_id=[1, 2], do_sample=True), "batch": lambda: library.BatchEncoding({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 3)}),
        "output": lambda: library.modeling_outputs.CausalLMOutputWithPast(loss=torch.ones(1), logits=torch.ones(1, 2)), "prediction": lambda: library.trainer_utils.PredictionOutput(predictions=torch.ones(2).numpy(), label_ids=None, metrics={"f1": 0.5}), "output2": lambda: library.trainer_utils.TrainOutput(3, 0.5, {"runtime": 1.0}),
        "features": lambda: [library.InputExample(guid="1", text_a="a", text_b="b", label="x")], "early": lambda: library.EarlyStoppingCallback(3), "bnb": lambda: library.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16), "gptq": lambda: library.GPTQConfig(bits=4, tokenizer="x"),
        "scheduler": lambda: library.get_linear_schedule_with_warmup(optimizer, 2, 9).state_dict(), "cosine": lambda: library.get_cosine_schedule_with_warmup(optimizer, 2, 9), "tokenizer": _tokenizer, "fast": lambda: _tokenizer().backend_tokenizer, "image": library.ViTImageProcessor, "adafactor": lambda: library.Adafactor([torch.ones(2, requires_grad=True)]),
        "collator": lambda: library.DataCollatorWithPadding(_tokenizer()), "slow": _slow_tokenizer, "cache": library.DynamicCache, "extractor": library.Wav2Vec2FeatureExtractor,
    }  # fmt: skip
    each(corpus, others)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")


def _slow_tokenizer() -> Any:
    from transformers import BertTokenizer

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "vocab.txt")
        with open(path, "w") as file:
            file.write("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
        return BertTokenizer(path)


@section
def trl(corpus: Corpus) -> None:
    import torch
    import trl as library

    names = "SFT DPO Reward GRPO PPO KTO ORPO CPO Online_DPO RLOO BCO XPO NashMD PRM Iterative_SFT GKD Alignprop DDPO"
    for name in names.split():
        cls = getattr(library, f"{name.replace('_', '')}Config", None)
        if cls is not None:
            corpus.save(
                f"{name}-training_args.bin",
                lambda path, cls=cls: torch.save(cls(output_dir="/tmp/out", report_to=[]), path),
            )
    for name in ("ModelConfig", "ScriptArguments"):
        if hasattr(library, name):
            corpus.put(name, getattr(library, name)(**({"dataset_name": "x"} if name[0] == "S" else {})), "torch")


@section
def peft(corpus: Corpus) -> None:
    import peft as library
    import torch

    for name in (
        "Lora",
        "IA3",
        "AdaLora",
        "PrefixTuning",
        "PromptTuning",
        "PromptEncoder",
        "LoHa",
        "LoKr",
        "OFT",
        "VeraConfig",
        "LNTuning",
        "BOFT",
        "Poly",
        "FourierFT",
        "HRA",
        "VBLoRA",
    ):
        cls = getattr(library, name if name.endswith("Config") else f"{name}Config", None)
        if cls is not None:
            given = (
                {"total_step": 10}
                if name == "AdaLora"
                else {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
                if name.startswith("Pr")
                else {"target_modules": ["q", "v"]}
                if name != "LNTuning"
                else {}
            )
            corpus.save(
                f"{name}.pkl",
                lambda path, cls=cls, given=given: written(
                    cls(**given), path, "pickle4" if corpus.is_first else "pickle2"
                ),
            )
    base = torch.nn.Sequential(collections.OrderedDict(a=torch.nn.Linear(3, 3)))
    for name, cls in (("lora", library.LoraConfig), ("ia3", library.IA3Config)):
        if corpus.mine(name):
            given = {"feedforward_modules": []} if name == "ia3" else {}
            corpus.save(
                f"{name}-model.pt",
                lambda path, cls=cls, given=given: torch.save(
                    library.get_peft_model(base, cls(target_modules=["a"], **given)), path
                ),
            )


@section
def sentence_transformers(corpus: Corpus) -> None:
    import sentence_transformers as library
    import torch

    for name in ("SentenceTransformerTrainingArguments", "CrossEncoderTrainingArguments"):
        cls = getattr(library, name, None)
        if cls is not None:
            corpus.save(
                f"{name}-training_args.bin",
                lambda path, cls=cls: torch.save(
                    cls(output_dir="/tmp/out", report_to=[], batch_sampler="no_duplicates"), path
                ),
            )
    cases = {
        "pooling": lambda: library.models.Pooling(8), "dense": lambda: library.models.Dense(8, 4), "normalize": library.models.Normalize, "example": lambda: [library.InputExample(texts=["a", "b"], label=0.5)],
        "lstm": lambda: library.models.LSTM(4, 3), "cnn": lambda: library.models.CNN(4), "layernorm": lambda: library.models.LayerNorm(4), "bow": lambda: library.models.BoW(["a", "b"]),
    }  # fmt: skip
    each(corpus, cases, "torch")


@section
def accelerate(corpus: Corpus) -> None:
    import torch
    from accelerate import Accelerator, utils

    cases = {
        "plugin": lambda: utils.DataLoaderConfiguration(split_batches=True), "accumulate": lambda: utils.GradientAccumulationPlugin(num_steps=3), "project": lambda: utils.ProjectConfiguration(project_dir="/x", total_limit=2), "ddp": lambda: utils.DistributedDataParallelKwargs(find_unused_parameters=True),
        "scaler": lambda: utils.GradScalerKwargs(init_scale=5.0), "init": lambda: utils.InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=5)), "autocast": utils.AutocastKwargs, "dynamo": lambda: utils.TorchDynamoPlugin(backend="inductor"), "fp8": lambda: utils.FP8RecipeKwargs(backend="msamp"),
    }  # fmt: skip
    each(corpus, cases)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with tempfile.TemporaryDirectory() as directory:
        accelerator.save_state(directory, safe_serialization=False)
        for path in pathlib.Path(directory).iterdir():
            corpus.save(path.name, lambda to, path=path: pathlib.Path(to).write_bytes(path.read_bytes()))


@section
def diffusers(corpus: Corpus) -> None:
    import diffusers as library

    names = "DDPM DDIM PNDM EulerDiscrete EulerAncestralDiscrete DPMSolverMultistep LMSDiscrete HeunDiscrete UniPCMultistep KDPM2Discrete DEISMultistep FlowMatchEulerDiscrete LCM"
    each(corpus, {f"{name}": (lambda name=name: getattr(library, f"{name}Scheduler")()) for name in names.split()})
    small = {"block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1}
    models = {
        "unet": lambda: library.UNet2DModel(sample_size=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **small), "vae": lambda: library.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2),
        "ema": lambda: _ema(library), "config": lambda: library.DDPMScheduler().config,
    }  # fmt: skip
    each(corpus, models, "torch")


def _ema(library: Any) -> Any:
    import torch
    from diffusers.training_utils import EMAModel

    return EMAModel(torch.nn.Linear(2, 2).parameters()).state_dict()


@section
def lightning(corpus: Corpus) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch import callbacks

    class Net(pl.LightningModule):
        def __init__(self, lr: float = 0.1, cfg: Any = None, sizes: Any = (1, 2), opt: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch[0]).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 2)

    hparams: dict[str, dict[str, Any]] = {
        "plain": {}, "dict": {"cfg": {"a": [1, 2], "b": {"c": None}}}, "namespace": {"cfg": argparse.Namespace(a=1, path=pathlib.Path("/x"))}, "typed": {"opt": torch.nn.GELU(), "sizes": torch.Size([2])}, "dates": {"cfg": datetime.datetime(2024, 1, 1)},
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        from omegaconf import OmegaConf

        hparams["omega"] = {"cfg": OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": [1, {"e": 2.5}]}, "m": "???"})}
    with tempfile.TemporaryDirectory() as directory:
        extra = (
            [callbacks.EarlyStopping("loss"), callbacks.ModelCheckpoint(monitor="loss", save_last=True)]
            if corpus.is_first
            else [
                callbacks.ModelCheckpoint(every_n_train_steps=1),
                callbacks.StochasticWeightAveraging(0.1),
                callbacks.Timer("00:01:00:00"),
            ]
        )
        for name, given in hparams.items():
            trainer = pl.Trainer(
                max_epochs=1,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=directory,
                accelerator="cpu",
                callbacks=list(extra) if name != "plain" else None,
            )
            trainer.fit(Net(**given))
            corpus.save(f"{name}.ckpt", lambda path, trainer=trainer: trainer.save_checkpoint(path))
    cases = {
        "early": lambda: callbacks.EarlyStopping("loss"), "checkpoint": lambda: callbacks.ModelCheckpoint(monitor="loss", dirpath="/x"), "rich": callbacks.LearningRateMonitor, "swa": lambda: callbacks.StochasticWeightAveraging(0.1), "grad": lambda: callbacks.GradientAccumulationScheduler({2: 3}),
    }  # fmt: skip
    each(corpus, cases)


@section
def omegaconf(corpus: Corpus) -> None:
    import torch
    from omegaconf import OmegaConf

    base = OmegaConf.create(
        {
            "model": {"name": "x", "layers": [1, 2, {"k": None}]},
            "lr": 1e-3,
            "out": "${model.name}/run",
            "flag": True,
            "missing": "???",
        }
    )
    cases = {
        "config": lambda: base, "list": lambda: OmegaConf.create([1, "a", {"b": 2.5}]), "inner": lambda: base.model, "readonly": lambda: _read_only(OmegaConf, base.copy()), "struct": lambda: _struct(OmegaConf, base.copy()),
        "bytes": lambda: OmegaConf.create({"b": b"x", "p": pathlib.Path("/a")}), "merged": lambda: OmegaConf.merge(base, {"model": {"name": "y"}}), "empty": OmegaConf.create,
    }  # fmt: skip
    each(corpus, cases, both=True)
    corpus.put("checkpoint", {"cfg": base, "model": torch.nn.Linear(2, 2).state_dict()}, "torch", "legacy")
    corpus.put("fairseq", {"cfg": base, "args": None, "model": {"w": torch.ones(2)}, "task_state": {}}, "torch")
    corpus.put("container", OmegaConf.to_container(base), "pickle4")


def _read_only(library: Any, config: Any) -> Any:
    library.set_readonly(config, True)
    return config


def _struct(library: Any, config: Any) -> Any:
    library.set_struct(config, True)
    return config


@section
def gymnasium(corpus: Corpus) -> None:
    import numpy as np
    from gymnasium import spaces

    cases = {
        "box": lambda: spaces.Box(-1, 1, (3,)), "discrete": lambda: spaces.Discrete(4), "dict": lambda: spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(2)), "tuple": lambda: spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]), "multi": lambda: spaces.MultiDiscrete([2, 3]),
        "text": lambda: spaces.Text(5), "sequence": lambda: spaces.Sequence(spaces.Discrete(2)), "graph": lambda: spaces.Graph(spaces.Box(0, 1, (2,)), None), "image": lambda: spaces.Box(0, 255, (4, 4, 3), np.uint8), "seeded": lambda: _seeded(spaces.Discrete(5)),
    }  # fmt: skip
    each(corpus, cases, both=True)


def _seeded(space: Any) -> Any:
    space.seed(4)
    space.sample()
    return space


@section
def stable_baselines3(corpus: Corpus) -> None:
    import stable_baselines3 as library
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    for name, env in (
        ("PPO", "CartPole-v1"),
        ("A2C", "CartPole-v1"),
        ("DQN", "CartPole-v1"),
        ("SAC", "Pendulum-v1"),
        ("TD3", "Pendulum-v1"),
        ("DDPG", "Pendulum-v1"),
    ):
        given: dict[str, Any] = (
            {"policy_kwargs": {"net_arch": [8]}}
            if corpus.is_first
            else {"policy_kwargs": {"net_arch": {"pi": [4], "vf": [4]} if name in ("PPO", "A2C") else [4]}, "seed": 1}
        )
        if name in ("DQN", "SAC", "TD3", "DDPG"):
            given["buffer_size"] = 100
        agent = getattr(library, name)("MlpPolicy", env, **given)
        corpus.save(f"{name}.zip", agent.save)
        if hasattr(agent, "save_replay_buffer"):
            corpus.save(f"{name}-replay.pkl", agent.save_replay_buffer)
    import gymnasium

    normalized = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]))
    corpus.save("normalize.pkl", normalized.save)


@section
def boosting(corpus: Corpus) -> None:
    import numpy as np

    x = np.random.rand(60, 4)
    y = (x[:, 0] > 0.5).astype(int)
    cases: dict[str, Callable[[], Any]] = {}
    with contextlib.suppress(ImportError):
        import xgboost as xgb

        cases |= {"xgb-cls": lambda: xgb.XGBClassifier(n_estimators=2).fit(x, y), "xgb-reg": lambda: xgb.XGBRegressor(n_estimators=2, objective="reg:absoluteerror", early_stopping_rounds=2).fit(x, y, eval_set=[(x, y)], verbose=False), "xgb-booster": lambda: xgb.train({"max_depth": 2}, xgb.DMatrix(x, y), 2), "xgb-rf": lambda: xgb.XGBRFRegressor(n_estimators=2).fit(x, y), "xgb-search": lambda: _search(xgb.XGBClassifier(n_estimators=2), x, y)}  # fmt: skip
    with contextlib.suppress(ImportError):
        import lightgbm as lgb

        cases |= {"lgb-cls": lambda: lgb.LGBMClassifier(n_estimators=2, verbose=-1).fit(x, y), "lgb-reg": lambda: lgb.LGBMRegressor(n_estimators=2, verbose=-1).fit(x, y, eval_set=[(x, y)]), "lgb-booster": lambda: lgb.train({"verbose": -1}, lgb.Dataset(x, y), 2), "lgb-rank": lambda: lgb.LGBMRanker(n_estimators=2, verbose=-1).fit(x, y, group=[30, 30]), "lgb-search": lambda: _search(lgb.LGBMClassifier(n_estimators=2, verbose=-1), x, y)}  # fmt: skip
    with contextlib.suppress(ImportError):
        import catboost as cat

        cases |= {
            "cat-cls": lambda: cat.CatBoostClassifier(iterations=2, verbose=0, allow_writing_files=False).fit(x, y),
            "cat-reg": lambda: cat.CatBoostRegressor(iterations=2, verbose=0, allow_writing_files=False).fit(x, y),
        }
    for name, make in cases.items():
        corpus.put(name, make())


def _search(model: Any, x: Any, y: Any) -> Any:
    from sklearn.model_selection import GridSearchCV

    return GridSearchCV(model, {"max_depth": [2, 3]}, cv=2).fit(x, y)


@section
def statsmodels(corpus: Corpus) -> None:
    import numpy as np
    import pandas as pd
    import statsmodels.api as sm
    import statsmodels.formula.api as formula
    from statsmodels.tsa import api as tsa

    x = np.random.rand(60, 3)
    y = x @ [1, 2, 3] + 0.1 * np.random.rand(60)
    binary = (y > 3).astype(int)
    frame = pd.DataFrame({"y": y, "a": x[:, 0], "b": x[:, 1], "g": binary})
    dated = pd.Series(y, pd.date_range("2020", periods=60, freq="D"))
    cases = {
        "ols": lambda: sm.OLS(y, sm.add_constant(x)).fit(), "wls": lambda: sm.WLS(y, x, weights=np.ones(60)).fit(), "gls": lambda: sm.GLS(y, x).fit(), "glm": lambda: sm.GLM(binary, x, family=sm.families.Binomial()).fit(), "gamma": lambda: sm.GLM(y, x, family=sm.families.Gamma(sm.families.links.Log())).fit(),
        "logit": lambda: sm.Logit(binary, x).fit(disp=0), "probit": lambda: sm.Probit(binary, x).fit(disp=0), "mnlogit": lambda: sm.MNLogit(np.arange(60) % 3, x).fit(disp=0), "poisson": lambda: sm.Poisson(np.arange(60) % 3, x).fit(disp=0), "negative": lambda: sm.NegativeBinomial(np.arange(60) % 5, x).fit(disp=0),
        "robust": lambda: sm.RLM(y, x).fit(), "quantile": lambda: sm.QuantReg(y, x).fit(), "formula": lambda: formula.ols("y ~ a + b", frame).fit(), "logged": lambda: formula.ols("np.log(y) ~ a * C(g)", frame).fit(), "mixed": lambda: formula.mixedlm("y ~ a", frame, groups="g").fit(), "gee": lambda: sm.GEE(y, x, groups=binary).fit(),
        "arima": lambda: tsa.ARIMA(dated, order=(1, 1, 1)).fit(), "sarimax": lambda: tsa.SARIMAX(y, order=(1, 0, 0), seasonal_order=(1, 0, 0, 4)).fit(disp=0), "holt": lambda: tsa.Holt(y).fit(), "smoothing": lambda: tsa.ExponentialSmoothing(dated, seasonal="add", seasonal_periods=7).fit(), "ar": lambda: tsa.AutoReg(dated, 3).fit(),
        "var": lambda: tsa.VAR(x).fit(1), "components": lambda: tsa.UnobservedComponents(y, "lltrend").fit(disp=0), "stl": lambda: tsa.STL(dated, period=7).fit(), "lowess": lambda: sm.nonparametric.KDEUnivariate(y).fit(), "pca": lambda: sm.multivariate.PCA(x), "ets": lambda: tsa.statespace.ExponentialSmoothing(y).fit(disp=0), "formula_logit": lambda: formula.logit("g ~ a + np.sqrt(b)", frame).fit(disp=0),
    }  # fmt: skip
    each(corpus, cases)


@section
def gensim(corpus: Corpus) -> None:
    from gensim import models
    from gensim.corpora import Dictionary

    texts = [["a", "b", "c"], ["a", "c", "d"], ["e", "a"]] * 8
    words = Dictionary(texts)
    bags = [words.doc2bow(text) for text in texts]
    tagged = [models.doc2vec.TaggedDocument(text, [number]) for number, text in enumerate(texts)]
    cases = {
        "word2vec": lambda: models.Word2Vec(texts, vector_size=4, min_count=1), "fasttext": lambda: models.FastText(texts, vector_size=4, min_count=1, bucket=20), "doc2vec": lambda: models.Doc2Vec(tagged, vector_size=4, min_count=1), "lda": lambda: models.LdaModel(bags, 2, words), "tfidf": lambda: models.TfidfModel(bags),
        "lsi": lambda: models.LsiModel(bags, id2word=words), "dictionary": lambda: words, "phrases": lambda: models.Phrases(texts, min_count=1), "phraser": lambda: models.phrases.Phraser(models.Phrases(texts, min_count=1)), "hdp": lambda: models.HdpModel(bags, words), "nmf": lambda: models.Nmf(bags, 2, words), "vectors": lambda: models.Word2Vec(texts, vector_size=4, min_count=1).wv, "rp": lambda: models.RpModel(bags), "logentropy": lambda: models.LogEntropyModel(bags),
    }  # fmt: skip
    for name, make in cases.items():
        if corpus.mine(name):
            model = make()
            corpus.save(f"{name}.model", model.save)
            corpus.put(name, model)


@section
def networkx(corpus: Corpus) -> None:
    import networkx as nx

    weighted = nx.Graph()
    weighted.add_weighted_edges_from([("a", "b", 0.5)])
    cases = {
        "path": lambda: nx.path_graph(5), "weighted": lambda: weighted, "directed": lambda: nx.DiGraph([(1, 2), (2, 3)]), "multi": lambda: nx.MultiGraph([(1, 2), (1, 2)]), "multidi": lambda: nx.MultiDiGraph([("a", "b")]), "karate": nx.karate_club_graph, "attributes": lambda: _graph(nx), "subgraph": lambda: nx.path_graph(5).subgraph([1, 2]).copy(),
    }  # fmt: skip
    each(corpus, cases, both=True)


def _graph(nx: Any) -> Any:
    graph = nx.Graph(name="x")
    graph.add_node(1, label="a", when=datetime.date(2024, 1, 1))
    return graph


@section
def imblearn(corpus: Corpus) -> None:
    import imblearn
    import numpy as np
    from imblearn.utils.testing import all_estimators

    x, y = np.random.rand(60, 4), np.arange(60) % 3 // 2
    for name, cls in all_estimators():
        if corpus.mine(name):
            with contextlib.suppress(Exception):
                model = cls()
                with contextlib.suppress(Exception):
                    (model.fit_resample if hasattr(model, "fit_resample") else model.fit)(x, y)
                corpus.put(name, model)
    from sklearn.tree import DecisionTreeClassifier

    corpus.put(
        "pipeline",
        imblearn.pipeline.make_pipeline(imblearn.over_sampling.RandomOverSampler(), DecisionTreeClassifier()).fit(x, y),
    )


@section
def ultralytics(corpus: Corpus) -> None:
    import torch
    from ultralytics import YOLO

    names = (
        ("yolov8n.yaml", "yolov8n-seg.yaml", "yolov5n.yaml")
        if corpus.is_first
        else ("yolo11n.yaml", "yolov8n-cls.yaml", "yolov8n-pose.yaml", "yolov10n.yaml", "yolov9t.yaml")
    )
    for name in names:
        model = YOLO(name).model
        corpus.save(
            f"{name[:-5]}.pt",
            lambda path, model=model: torch.save(
                {
                    "epoch": -1,
                    "best_fitness": None,
                    "model": model.half(),
                    "ema": None,
                    "updates": None,
                    "optimizer": None,
                    "train_args": {"task": "detect", "epochs": 3},
                    "train_metrics": {"fitness": 0.1},
                    "train_results": {"epoch": [1]},
                    "date": datetime.datetime(2024, 1, 1).isoformat(),
                    "version": "8.3.0",
                    "license": "AGPL-3.0",
                },
                path,
            ),
        )


@section
def mmengine(corpus: Corpus) -> None:
    import torch
    from mmengine import Config, ConfigDict
    from mmengine.logging import HistoryBuffer, MessageHub

    hub = MessageHub("a")
    hub.update_scalar("train/loss", 0.5)
    hub.update_info("iter", 3)
    state = {"meta": {"cfg": "model = 1", "seed": 3, "epoch": 1, "time": "2024", "mmengine_version": "0.10", "experiment_name": "x", "dataset_meta": {"classes": ("a", "b")}}, "state_dict": torch.nn.Linear(2, 2).state_dict(), "message_hub": hub.state_dict(), "optimizer": _stepped(torch.optim.SGD).state_dict(), "param_schedulers": [{"last_step": 1}]}  # fmt: skip
    corpus.put("checkpoint", state, "torch", "legacy")
    each(
        corpus,
        {
            "history": lambda: HistoryBuffer([1.0, 2.0], [1, 1]),
            "config": lambda: ConfigDict(a=ConfigDict(b=1)),
            "whole": lambda: Config({"a": {"b": [1, 2]}}),
        },
        both=True,
    )


@section
def geometric(corpus: Corpus) -> None:
    import torch
    from torch_geometric import data, nn

    edges = torch.tensor([[0, 1], [1, 0]])
    graph = data.Data(x=torch.ones(2, 3), edge_index=edges, y=torch.zeros(1))
    mixed = data.HeteroData()
    mixed["a"].x = torch.ones(2, 3)
    cases = {
        "data": lambda: graph, "list": lambda: [graph, graph], "batch": lambda: data.Batch.from_data_list([graph, graph]), "hetero": lambda: mixed, "gcn": lambda: nn.GCNConv(3, 2), "gat": lambda: nn.GATConv(3, 2), "sage": lambda: nn.SAGEConv(3, 2), "gin": lambda: nn.GINConv(torch.nn.Linear(3, 2)),
    }  # fmt: skip
    each(corpus, cases, "torch", both=True)


@section
def datasets(corpus: Corpus) -> None:
    import datasets as library

    table = library.Dataset.from_dict({"a": [1, 2], "b": ["x", "y"]})
    each(
        corpus,
        {
            "dataset": lambda: table,
            "features": lambda: table.features,
            "dict": lambda: library.DatasetDict(train=table),
            "label": lambda: library.ClassLabel(names=["a", "b"]),
            "split": lambda: library.Split.TRAIN,
        },
        both=True,
    )


@section
def nltk(corpus: Corpus) -> None:
    import nltk as library

    words = ["a", "b", "c", "a", "b", "a", "d"]
    cases = {
        "freq": lambda: library.FreqDist(words), "conditional": lambda: library.ConditionalFreqDist(library.bigrams(words)), "bayes": lambda: library.NaiveBayesClassifier.train([({"a": 1}, "x"), ({"a": 2}, "y")]), "unigram": lambda: library.UnigramTagger([[("a", "X"), ("b", "Y")]], backoff=library.DefaultTagger("N")),
        "tree": lambda: library.Tree.fromstring("(S (A a) (B b))"), "stemmer": library.PorterStemmer, "regexp": lambda: library.RegexpTokenizer(r"\w+"), "snowball": lambda: library.SnowballStemmer("english"), "perceptron": lambda: _perceptron(library), "punkt": lambda: library.tokenize.punkt.PunktSentenceTokenizer("A b. C d. E f."),
    }  # fmt: skip
    each(corpus, cases, both=True)


def _perceptron(library: Any) -> Any:
    tagger = library.PerceptronTagger(load=False)
    tagger.train([[("a", "X"), ("b", "Y")]])
    return tagger.model


@section
def shapely(corpus: Corpus) -> None:
    from shapely import geometry

    cases = {
        "point": lambda: geometry.Point(1, 2),
        "polygon": lambda: geometry.box(0, 0, 1, 1),
        "lines": lambda: geometry.MultiLineString([[(0, 0), (1, 1)]]),
        "mapping": lambda: {"area": geometry.box(0, 0, 1, 1), "n": 3},
    }
    each(corpus, cases, both=True)


# Libraries that the grammar does not have.


@section
def foreign_models(corpus: Corpus) -> None:
    import numpy as np

    x, y = np.random.rand(40, 3), np.arange(40) % 2

    def pyod() -> Any:
        from pyod.models.knn import KNN

        return KNN().fit(x)

    def encoders() -> Any:
        import category_encoders as encoders

        return encoders.TargetEncoder(cols=[0]).fit(x.round(), y)

    def mlxtend() -> Any:
        from mlxtend.classifier import EnsembleVoteClassifier
        from sklearn.linear_model import LogisticRegression

        return EnsembleVoteClassifier([LogisticRegression()]).fit(x, y)

    def lifelines() -> Any:
        import lifelines

        return lifelines.KaplanMeierFitter().fit([1, 2, 3])

    def hmm() -> Any:
        from hmmlearn.hmm import GaussianHMM

        return GaussianHMM(2).fit(x)

    def skorch() -> Any:
        import skorch
        import torch

        return skorch.NeuralNetRegressor(
            torch.nn.Linear, module__in_features=3, module__out_features=1, max_epochs=1, verbose=0
        ).fit(x.astype("f4"), y.astype("f4")[:, None])

    def umap() -> Any:
        import umap

        return umap.UMAP(n_neighbors=3).fit(x)

    def bm25() -> Any:
        from rank_bm25 import BM25Okapi

        return BM25Okapi([["a", "b"], ["c"]])

    def fastai() -> Any:
        import torch
        from fastai.optimizer import Adam

        return Adam([torch.nn.Parameter(torch.ones(2))], 0.1).state_dict()

    def timm() -> Any:
        import timm

        return timm.create_model("resnet18")

    def polars() -> Any:
        import polars

        return polars.DataFrame({"a": [1]})

    each(
        corpus,
        {
            make.__name__: make
            for make in (pyod, encoders, mlxtend, lifelines, hmm, skorch, umap, bm25, fastai, timm, polars)
        },
        both=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["first", "last", "foreign"])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("sections", nargs="*")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    asked.directory.mkdir(parents=True, exist_ok=True)
    if len(asked.sections) == 1:
        corpus = Corpus(asked.part, asked.directory, asked.sections[0])
        try:
            SECTIONS[corpus.section](corpus)
        except ImportError as error:
            print("left out:", corpus.section, error)
        except Exception:
            print("failed:", corpus.section, traceback.format_exc(limit=2))
        print(corpus.section, corpus.count)
        return
    for name in asked.sections or SECTIONS:
        if asked.sections or (asked.part == "foreign") == name.startswith("foreign"):
            # Each in a process of its own: dill changes how others pickle once it is imported.
            subprocess.run([sys.executable, __file__, asked.part, str(asked.directory), name], check=False)


if __name__ == "__main__":
    main()
