"""The shape of the house: import arrows, light imports, public names, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll

SOURCE = Path(atoll.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# A module may import from the groups named for it, and from its own group.
FOUNDATION = {
    "arguments",
    "errors",
    "extras",
    "failures",
    "spec",
    "status",
    "result",
    "handle",
    "context",
    "_time",
    "names",
    "gpu",
    "entry",
    "home",
    "installing",
    "suggestion",
}
MAY_IMPORT = {
    "stores": FOUNDATION | {"_passes"},
    "rounds": FOUNDATION | {"_compiled", "_passes", "stores.base"},
    "executors": FOUNDATION | {"replica.spool", "replica.processes"},
    "training": FOUNDATION | {"rounds", "stores", "registry"},
    "replica": FOUNDATION | {"rounds", "stores", "registry", "journal", "workspace"},
}
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
    """Names of atoll modules that the file imports while it is loaded or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("atoll"):
            base = node.module.removeprefix("atoll").removeprefix(".")
            names = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (name if (SOURCE / (name.replace(".", "/") + ".py")).exists() else base for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("atoll.") for alias in node.names if alias.name.startswith("atoll."))


@pytest.mark.parametrize("group", sorted(MAY_IMPORT))
def test_imports_point_one_way(group):
    allowed = MAY_IMPORT[group] | {group}
    for path in sorted((SOURCE / group).rglob("*.py")):
        for name in imports_of(path):
            fits = any(name == one or name.startswith(f"{one}.") for one in allowed)
            exempt = path.name == "context.py" or name in ("", "__version__")
            assert fits or exempt, f"{path.relative_to(SOURCE)} imports atoll.{name}"


def test_adapters_never_import_each_other():
    for path in sorted((SOURCE / "executors").rglob("*.py")):
        mine = path.relative_to(SOURCE / "executors").parts[0].removesuffix(".py")
        for name in imports_of(path):
            if name.startswith("executors.") and name != "executors.base":
                assert name.split(".")[1] == mine, f"{path} imports {name}"


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
        "import atoll.replica.shepherd, atoll.replica.worker",
        "import atoll.executors.local.executor",
        "import atoll.cli.main",
        "import atoll.estimate, atoll.cli.estimating",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert not modules_after(code) & HEAVY


def test_the_public_names_are_exact_and_each_one_loads():
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    assert sorted(dir(atoll)) == sorted(atoll.__all__)
    with pytest.raises(AttributeError, match=r"no attribute `nope`$"):
        atoll.nope  # noqa: B018


@pytest.mark.parametrize(
    ("name", "meant"), [("Diloco", "DiLoCo"), ("LocalSgd", "LocalSGD"), ("lunch", "launch"), ("Replicacontext", "Repl")]
)
def test_a_public_name_that_is_misspelt_says_which_one_may_be_meant(name, meant):
    with pytest.raises(AttributeError, match=f"module `atoll` has no attribute `{name}`, did you mean `{meant}"):
        getattr(atoll, name)
    assert not hasattr(atoll, name)


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


def test_files_and_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
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
