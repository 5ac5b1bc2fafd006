"""The stubs of the native module, by which the package's calls into it are checked, are those of the module itself."""

import ast
import re
from pathlib import Path

import pytest
from heddle import _heddle

_STUBS = ast.parse(Path(_heddle.__file__).with_name("_heddle.pyi").read_text()).body
_ALIASES = {x.target.id: x.value for x in _STUBS if isinstance(x, ast.AnnAssign)}


def nodes_of(body):
    return {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def signature_of(function):
    """What nanobind says of a function, as ast."""
    ((text, _, defaults),) = function.__nb_signature__
    text = re.sub(r"\\(\d+)", lambda number: repr(defaults[int(number[1])]), text)
    text = text.replace("ArrayLike[]", "Any").replace("collections.abc.", "").replace("heddle._heddle.", "")
    return ast.parse(text.replace("def (", "def _(") + ": ...").body[0]


def outer(annotation):
    """A type without its parameters: nanobind knows no more of a list than that it is one."""
    if isinstance(annotation, ast.BinOp):
        return f"{outer(annotation.left)} | {outer(annotation.right)}"
    annotation = _ALIASES.get(ast.unparse(annotation), annotation)
    return ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def parameters(node, method):
    arguments = node.args
    assert not arguments.vararg and not arguments.kwarg and not arguments.kwonlyargs
    found = [*arguments.posonlyargs, *arguments.args]
    assert not method or found.pop(0).arg == "self"
    defaults = [ast.unparse(default) for default in arguments.defaults]
    return (
        [(x.arg, outer(x.annotation)) for x in found],
        defaults,
        len(arguments.posonlyargs),
        outer(node.returns),
    )


def native_functions():
    """name -> (the function, whether it is bound to an instance, whether it is a property)"""
    found = {name: (x, False, False) for name, x in vars(_heddle).items() if type(x).__name__ == "nb_func"}
    for cls in (_heddle.Checkpoint, _heddle.Encoder, _heddle.ShardPlan):
        for name in vars(cls).keys() - {"__init__", "__new__", "__doc__", "__module__"}:
            x = getattr(cls, name)
            is_property = isinstance(x, property)
            found[f"{cls.__name__}.{name}"] = (x.fget if is_property else x, type(x).__name__ != "nb_func", is_property)
    return found


def stubs():
    top = nodes_of(_STUBS)
    classes = {name: top.pop(name) for name in list(top) if isinstance(top[name], ast.ClassDef)}
    inner = {f"{cls}.{name}": x for cls, node in classes.items() for name, x in nodes_of(node.body).items()}
    return classes, top | inner


def test_names_are_those_of_the_module():
    classes, functions = stubs()
    assert sorted(classes) == sorted(name for name, x in vars(_heddle).items() if isinstance(x, type))
    assert sorted(functions) == sorted(native_functions())


@pytest.mark.parametrize("name", sorted(native_functions()))
def test_signature_is_that_of_the_module(name):
    function, method, is_property = native_functions()[name]
    stub = stubs()[1][name]
    decorators = ["property"] if is_property else ["staticmethod"] if "." in name and not method else []
    assert [ast.unparse(x) for x in stub.decorator_list] == decorators
    assert parameters(stub, method) == parameters(signature_of(function), method)
