"""What a node of a tree is known by, and whether its data is in its file."""

from __future__ import annotations

from ckptconv.pickles.nodes import Global, Opaque, class_of, lacks_data


def test_objects_and_functions_are_known_by_the_names_of_their_classes() -> None:
    name = Global("torch.nn.parameter", "UninitializedParameter")
    assert class_of(Opaque(name, (), ())) == str(name) == class_of(name) == "torch.nn.parameter.UninitializedParameter"
    for data in (3, "text", [1], {"a": 1}, None):
        assert class_of(data) == ""


def test_only_an_object_lacks_data_not_the_class_that_it_is_of() -> None:
    for module, name in (("torch.nn.parameter", "UninitializedParameter"), ("torch.distributed.tensor", "DTensor")):
        assert lacks_data(Opaque(Global(module, name), (), ())) != ""
    assert lacks_data(Global("torch.nn.parameter", "UninitializedParameter")) == ""
    assert lacks_data(Opaque(Global("torch.nn", "Linear"), (), ())) == ""
