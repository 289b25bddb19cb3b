"""The layout of the package: imports between folders, light imports, public names, sizes of functions."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import atoll

SOURCE = Path(atoll.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

HEAVY = {
    "torch",
    "numpy",
    "boto3",
    "kubernetes",
    "obstore",
    "rich",
    "click",
    "asyncio",
    "http",
    "ssl",
    "multiprocessing",
}


def imports_of(path: Path) -> Iterator[str]:
    """The atoll modules that a file imports, at its top or in functions; imports for type checkers do not count."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "atoll":
            base = (node.module or "").removeprefix("atoll").removeprefix(".")
            names = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (name if name in MODULES else base for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("atoll.") for alias in node.names if alias.name.startswith("atoll."))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_of(path): path for path in FILES}


def folder_of(module: str) -> str:
    """The folder a module stands in; empty for the top-level files."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def folder_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module and path.name != "__main__.py":  # `atoll/__init__.py` loads its names lazily, by string
            mine = folder_of(module)
            theirs = {folder_of(name) for name in imports_of(path) if name}
            graph.setdefault(mine, set()).update(theirs - {mine})
    return graph


def test_folders_import_each_other_in_no_circle():
    try:
        order = list(TopologicalSorter(folder_graph()).static_order())
    except CycleError as exc:
        pytest.fail(
            f"folders import each other in a circle: {' <- '.join(folder or 'atoll' for folder in exc.args[1])}"
        )
    assert order[0] == "", "the top-level files import no folder, so they come first"


def test_a_circle_of_folders_would_be_found(monkeypatch):
    graph = folder_graph()
    assert "" in graph["stores"]
    with pytest.raises(CycleError):
        list(TopologicalSorter({**graph, "": {"stores"}}).static_order())


def test_top_level_files_import_no_folder():
    assert folder_graph()[""] == set()


def test_adapters_never_import_each_other():
    graph = folder_graph()
    adapters = {folder for folder in graph if folder.startswith("executors.")}
    assert adapters
    for folder in adapters:
        assert not graph[folder] & (adapters - {folder}), folder


def test_only_training_imports_torch():
    for module, path in MODULES.items():
        roots = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert module.startswith("training") or not roots & {"torch", "torchft"}, module


def modules_after(code: str) -> set[str]:
    printed = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout
    return {name.partition(".")[0] for name in printed.split()}


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "import atoll",
        "import atoll; atoll.launch; atoll.ReplicaContext",
        "import atoll.replica.supervisor, atoll.replica.entry_runner",
        "import atoll.executors.local.executor",
        "import atoll.cli.main",
        "import atoll.reports.estimate",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert not modules_after(code) & HEAVY


@pytest.mark.process  # torch asks other programs about this machine
def test_the_public_names_are_exact_and_each_one_loads():
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    assert sorted(dir(atoll)) == sorted(atoll.__all__)
    with pytest.raises(AttributeError, match=r"`nope`$"):
        atoll.nope  # noqa: B018


@pytest.mark.parametrize(
    ("name", "meant"), [("Diloco", "DiLoCo"), ("LocalSgd", "LocalSGD"), ("lunch", "launch"), ("Replicacontext", "Repl")]
)
def test_a_public_name_that_is_misspelt_says_which_one_may_be_meant(name, meant):
    with pytest.raises(AttributeError, match=f"`{name}`.*`{meant}"):
        getattr(atoll, name)
    assert not hasattr(atoll, name)


def test_the_import_of_a_submodule_computes_no_suggestion(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("atoll.errors.did_you_mean", lambda name, known: asked.append(name) or "")
    submodules = [module.name for module in pkgutil.iter_modules(atoll.__path__)]
    for name in [*submodules, "lunch"]:
        with pytest.raises(AttributeError):
            atoll.__getattr__(name)
    assert "errors" in submodules
    assert asked == ["lunch"]


def test_public_names_for_type_checkers_are_the_lazy_ones():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    ours = [n for n in block.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("atoll")]
    typed = {alias.asname or alias.name for node in ours for alias in node.names}
    assert typed | {"__version__"} == set(atoll.__all__)


def test_every_exception_is_drawn_in_the_tree():
    from atoll import errors

    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AtollError):
            assert name in drawn, f"{name} is not in the picture"


def test_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_every_module_says_what_it_is():
    for path in FILES:
        if path.read_text().strip():
            doc = ast.get_docstring(ast.parse(path.read_text()))
            assert doc, f"{path} has no docstring"


def test_nothing_unpickles_and_nothing_runs_through_a_shell():
    for path in FILES:
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}, path
            if isinstance(node, ast.keyword) and node.arg == "shell":
                raise AssertionError(f"{path}:{node.value.lineno} uses shell=")
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("system", "popen")
                and getattr(node.value, "id", "") == "os"
            ):
                raise AssertionError(f"{path}:{node.lineno} uses os.{node.attr}")
