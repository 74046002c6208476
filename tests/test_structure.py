"""The house: imports go downward only, so that a file can be read, and taken away, with what stands below it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up; modules of one line do not import one another, except inside a folder that is named as a whole.
# A module that is not named here stands at the top: it may import all the others, and none of these may import it.
LEVELS = [
    "errors",
    "attention.masks attention.positions files layers packed runtime schedule trouble",
    "parallel sampling",
    "muon",
    "attention.frame optim console tales tensors tokenizer",
    "attention.cache attention.kernels checkpoint shards streaming tracking",
    "attention.layer data plots",
    "attention.linear attention.diagnostics embedding",
    "attention",
    "model",
    "cost decoding evaluation generation",
    "update",
    "training",
    "build",
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names.split()}


def modules():
    """Every module of minilm by its dotted name below minilm, and its source."""
    for path in sorted((ROOT / "minilm").rglob("*.py")):
        parts = path.relative_to(ROOT / "minilm").with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path.read_text(encoding="utf-8")


SOURCES = dict(modules())


def imported(source):
    """The full names of all that a source imports, wherever in it: 'minilm.data', 'torch', 'torch.nn'."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            inside = [f"{node.module}.{alias.name}".removeprefix("minilm.") for alias in node.names]
            modules = [f"minilm.{name}" for name in inside if name in SOURCES]
            yield from modules or [node.module]


def own(name):
    """Names below minilm that module `name` imports; the package minilm itself is nobody's."""
    names = (full.removeprefix("minilm.") for full in imported(SOURCES[name]) if full.startswith("minilm."))
    return {found for found in names if found != name}


@pytest.mark.parametrize("name", SOURCES)
def test_imports_go_downward_only(name):
    for below in own(name):
        assert below in SOURCES, f"minilm.{name} imports minilm.{below}, which is not there"
        if name in LEVEL:
            assert below in LEVEL, f"minilm.{name} imports minilm.{below}, which has no level below it"
            assert LEVEL[below] < LEVEL[name], (
                f"minilm.{name} imports minilm.{below}, which does not stand below it"
            )


def test_no_module_needs_itself():
    tuple(TopologicalSorter({name: own(name) for name in SOURCES}).static_order())  # raises for a cycle


def test_every_level_names_modules_that_are_there():
    assert set(LEVEL) <= set(SOURCES)


@pytest.mark.parametrize("name", [name for name in SOURCES if name.split(".")[0] == "attention"])
def test_attention_knows_attention_and_torch_and_nothing_else(name):
    allowed = {"attention", "errors"}
    assert {below.split(".")[0] for below in own(name)} <= allowed
    others = {full.split(".")[0] for full in imported(SOURCES[name])} - {"minilm", "torch"}
    assert others <= {"collections", "contextlib", "dataclasses", "functools", "math", "typing"}


@pytest.mark.parametrize("name", SOURCES)
def test_only_the_command_line_and_the_launching_of_jobs_know_hydra(name):
    hydra = {full.split(".")[0] for full in imported(SOURCES[name])} & {"hydra", "omegaconf"}
    assert not hydra or name in ("config", "lab.jobs", "mistakes", "words")


@pytest.mark.parametrize("name", ["config", "mistakes", "words"])
def test_a_misspelt_key_is_answered_before_torch_is_there(name):
    assert "torch" not in {full.split(".")[0] for full in imported(SOURCES[name])}
    assert own(name) <= {"errors", "mistakes", "words"}
