"""The shape of the project itself: names that match across folders, a short root, an import that loads little."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onnxgrad
from onnxgrad.op import OPERATORS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onnxgrad"
SOURCES = sorted(
    path for folder in ("src", "tests", "bench", "docs", "examples") for path in (ROOT / folder).rglob("*.py")
)
MOST_IN_THE_ROOT = 8
# Results of others to compare with, models of others, calls and graphs drawn at random.
WITHOUT_PACKAGE = {"data", "fuzz", "models", "random_graphs"}


def modules(folder):
    """The modules of one folder, without those of folders below."""
    return sorted(path.stem for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__")


def public_functions(path):
    """{name: names of its parameters} of what a file defines, private names aside."""
    found = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    return {
        f.name: [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        for f in found
        if not f.name.startswith("_")
    }


def kernels_of(module):
    """{name: names of its parameters} of the kernels that the operators of a module ask for."""
    return {
        op.function_name: [
            *(i.name for i in op.inputs),
            *(o.name for o in op.outputs),
            *(a.name for a in op.attributes),
        ]
        for op in OPERATORS.values()
        if op.module == module
    }


# What only reads shapes runs on the host, wherever the arrays are, and so does what talks to other processes.
WITHOUT_CUDA = {"all_reduce"}
WITHOUT_CPU = {"bias", "channels_last", "packed_attention"}  # what steps on GPUs alone have
ON_THE_CPU = sorted({op.module for op in OPERATORS.values()} - WITHOUT_CPU)
ON_A_GPU = sorted({op.module for op in OPERATORS.values() if not op.on_host_only} - WITHOUT_CUDA)


def test_every_operator_has_a_kernel_file_and_every_kernel_file_an_operator():
    assert modules("cpu") == ON_THE_CPU
    assert modules("cuda") == ON_A_GPU
    assert set(modules("functions")) >= set(modules("ops"))


def test_the_root_of_the_package_is_short():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_IN_THE_ROOT


def test_every_folder_of_tests_is_that_of_a_package():
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    assert not {f for f in folders if str(f) not in WITHOUT_PACKAGE and not (PACKAGE / f / "__init__.py").exists()}


@pytest.mark.parametrize("module", ON_THE_CPU)
def test_kernels_have_the_names_and_parameters_of_their_operators(module):
    expected = kernels_of(module)
    assert expected
    kernels = public_functions(PACKAGE / "cpu" / f"{module}.py")
    for name, parameters in kernels.items():
        if parameters[-1:] == ["memory"]:  # what it may assume of its results, for kernels that can make use of it
            kernels[name] = parameters[:-1]
    assert kernels == expected


@pytest.mark.parametrize("module", ON_A_GPU)
def test_cuda_kernels_have_them_too_and_are_told_where_to_record_a_bad_index(module):
    found = public_functions(PACKAGE / "cuda" / f"{module}.py")
    for name, parameters in kernels_of(module).items():
        assert found[name] in ([*parameters, "bad"], [*parameters, "bad", "deterministic"]), name


@pytest.mark.parametrize("module", modules("ops"))
def test_every_operator_file_has_its_tests(module):
    assert (ROOT / "tests" / "ops" / f"test_{module}.py").exists()


def test_operators_are_named_as_their_functions():
    for name, op in OPERATORS.items():
        assert name.lower().replace("_", "") == op.function_name.replace("_", "")


def test_every_operator_is_a_name_of_the_package():
    assert all(getattr(onnxgrad, op.function_name) is op for op in OPERATORS.values())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_open_with_a_sentence(path):
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text))
    assert doc and doc.splitlines()[0][-1] in ".:", "a module opens with one sentence"
    assert path.stem not in ("utils", "util", "helpers", "helper", "common", "misc")


def test_import_loads_no_compiler_and_no_framework():
    code = (
        "import sys\nimport onnxgrad\n"
        "heavy = ['numba', 'llvmlite', 'torch', 'triton', 'onnxruntime', 'onnx_ir', 'rich', 'click', 'mpi4py']\n"
        "print(*[m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
