"""Imports go down: kernels <- support <- maths <- config <- training <- model files <- estimator and head <- people.

What does not yet is listed, and the list may only shrink. No import hides in a function, but the command line's and
those of optional libraries.
"""

import ast

from tests.helpers import ROOT

PACKAGE_ROOT = ROOT / "src" / "augment_reduce"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "_address_space", "kernels"),
    ("support", "sharding"),
    ("optim", "model", "sampling", "local"),
    ("config",),
    ("training",),
    ("persistence",),
    ("classifier",),
    ("estimator", "nn"),
    ("integrations",),
    ("data", "reports", "reproduction", "cli"),
)  # fmt: skip
PACKAGE = "augment_reduce."
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
UPWARDS: set[tuple[str, str]] = set()
HIDDEN = {
    ("nn._backend", "nn.triton.step"),
}


def imports():
    """(module, what of ours it imports, whether inside a function) for every import below the package."""
    for path in sorted(PACKAGE_ROOT.rglob("*.py")):
        module = path.relative_to(PACKAGE_ROOT).with_suffix("")
        if str(module) == "__init__":
            continue  # the public names, from everywhere
        folder = module.parts[:-1]
        name = ".".join(folder if module.name == "__init__" else module.parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            for target in targets(node, folder):
                yield name, target, id(node) in inside


def targets(node: ast.AST, folder: tuple[str, ...]) -> list[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        return [a.name.removeprefix(PACKAGE) for a in node.names if a.name.startswith(PACKAGE)]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level:
        base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
    elif (node.module or "").split(".")[0] == PACKAGE[:-1]:
        base = node.module.split(".")[1:]
    else:
        return []
    parts = [part for part in base if part]
    return [named([*parts, a.name]) or ".".join(parts) for a in node.names]


def named(parts: list[str]) -> str | None:
    """The module of that name, if it is one and not something in one."""
    return ".".join(parts) if PACKAGE_ROOT.joinpath(*parts).with_suffix(".py").exists() else None


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_room():
    assert {room(name) for name, _, _ in imports()} <= RANK.keys()


def test_imports_go_down():
    found = {(name, to) for name, to, _ in imports() if room(to) in RANK and RANK[room(to)] > RANK[room(name)]}
    assert found == UPWARDS, "a new import goes up, or one is gone and leaves the list"


def test_imports_stand_at_the_top():
    found = {(name, to) for name, to, inside in imports() if inside and room(name) != "cli"}
    assert found == HIDDEN, "a new import hides in a function, or one is gone and leaves the list"
