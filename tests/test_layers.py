"""Imports go down: kernels <- support <- maths <- training <- estimator and head <- people.

What does not yet is listed, and the list may only shrink. No import hides in a function, but the command line's and
those of optional libraries.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "augment_reduce"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("kernels",),
    ("_version", "_address_space", "memory", "limits", "ranges", "seeds", "atomic", "layout", "tensor_file",
     "files", "interrupts", "progress"),
    ("noise", "bounds", "gaussian", "quadrature", "mode_grid", "optim", "sampler", "samplers", "local", "crossed",
     "amortised", "scores", "predict", "features", "labels"),
    ("linear", "merging", "encoding", "defaults", "noise_scale",
     "vem", "training", "looks", "fitting", "direct", "direct_fit", "cross_validation",
     "prior_search", "edge", "diagnosis", "model_checks", "saving"),
    ("estimator", "nn"),
    ("data", "metrics", "figures", "experiments", "demo", "cli"),
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
UPWARDS = {
    ("kernels._cpu_local", "local"),
    ("kernels._cpu_local", "noise"),
    ("kernels._cpu_local", "seeds"),
    ("kernels._cpu_noise", "noise"),
    ("kernels._cpu_noise_rows", "bounds"),
    ("kernels._cpu_noise_rows", "noise"),
    ("kernels._cpu_noise_runs", "gaussian"),
    ("kernels._cpu_push", "optim"),
    ("kernels._cpu_quarters", "optim"),
    ("kernels._cpu_rules", "optim"),
    ("kernels.compiled", "local"),
    ("kernels.compiled", "noise"),
    ("kernels.compiled", "optim"),
    ("kernels.compiled", "sampler"),
    ("kernels.compiled", "seeds"),
    ("kernels.compiled", "vem"),
    ("kernels.cpu", "optim"),
    ("kernels.cuda", "amortised"),
    ("kernels.cuda", "nn"),
    ("kernels.cuda", "nn._draw"),
    ("kernels.cuda", "nn._local"),
    ("kernels.cuda", "nn._plain"),
    ("kernels.cuda", "nn._rows"),
    ("kernels.cuda", "nn._step"),
    ("kernels.cuda", "noise"),
    ("kernels.device", "optim"),
    ("kernels.reference", "optim"),
    ("kernels.runs", "crossed"),
    ("kernels.runs", "gaussian"),
    ("kernels.runs", "local"),
    ("kernels.runs", "noise"),
    ("kernels.runs", "optim"),
    ("kernels.runs", "sampler"),
    ("kernels.runs", "scores"),
    ("kernels.runs", "vem"),
    ("saving", "estimator"),
}
HIDDEN = {
    ("bounds", "kernels"),
    ("demo", "cli.writing"),
    ("experiments.command", "atomic"),
    ("experiments.command", "experiments.board"),
    ("experiments.command", "experiments.figure"),
    ("experiments.command", "experiments.report"),
    ("experiments.command", "experiments.runner"),
    ("experiments.command", "experiments.show"),
    ("experiments.command", "experiments.sources"),
    ("experiments.command", "experiments.store"),
    ("experiments.command", "experiments.tables"),
    ("fitting", "kernels"),
    ("fitting", "kernels._cpu_alike"),
    ("gaussian", "kernels"),
    ("kernels.rows", "kernels._cpu_alike"),
    ("local", "kernels._cpu_local"),
    ("nn._backend", "kernels"),
    ("noise", "kernels"),
    ("samplers.conditional", "scores"),
    ("samplers.pointed", "kernels._cpu_batch"),
    ("samplers.pointed", "kernels._cpu_pointers"),
    ("scores", "kernels"),
    ("seeds", "kernels"),
    ("seeds", "kernels.cpu"),
    ("training", "kernels"),
    ("vem", "kernels.compiled"),
}


def imports():
    """(module, what of ours it imports, whether inside a function) for every import below the package."""
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("")
        if str(module) == "__init__":
            continue  # the public names, from everywhere
        folder = module.parts[:-1]
        name = ".".join(folder if module.name == "__init__" else module.parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
                parts = [part for part in base if part]
                for target in [".".join(parts)] if node.module else [".".join([*parts, a.name]) for a in node.names]:
                    yield name, target, id(node) in inside


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
