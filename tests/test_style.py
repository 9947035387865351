"""One idea per line: what ruff does not check, in every Python file of the repository.

`python tests/test_style.py FILE ...` lists the problems of some files.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *sorted(ROOT.glob("*.py")),
    *sorted(ROOT.glob("benchmark/**/*.py")),
    *sorted(ROOT.glob("docs/*.py")),
    *sorted(ROOT.glob("tests/**/*.py")),
]
VAGUE = {
    "asked",
    "found",
    "heard",
    "known",
    "made",
    "odd",
    "own",
    "part",
    "said",
    "told",
    "wanted",
}


def find_problems(source: str) -> list[str]:
    """What the style forbids in a file, as "line: problem"."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        problem = find_problem(node)
        if problem:
            line = node.iter.lineno if isinstance(node, ast.comprehension) else node.lineno
            problems.append(f"{line}: {problem}")
    return problems


def find_problem(node: ast.AST) -> str:
    """What the style forbids at this node, nothing ("") if it is fine."""
    match node:
        case ast.Assign(targets=[ast.Tuple() as target], value=ast.Tuple() as value):
            if not is_swap(target, value):
                return "unrelated values are assigned through one tuple"
        case ast.For() | ast.comprehension():
            if is_conditional(node.iter):
                return "a loop over a conditional expression"
        case ast.BinOp(op=ast.Mult()):
            if is_sequence(node.left) and is_condition(node.right):
                return "a string or list times a condition"
            if is_sequence(node.right) and is_condition(node.left):
                return "a string or list times a condition"
        case ast.Expr(value=ast.BoolOp() | ast.IfExp()):
            return "an expression in place of an if statement"
        case ast.Lambda(body=ast.BoolOp() | ast.Tuple()):
            calls = [child for child in ast.walk(node.body) if isinstance(child, ast.Call)]
            if len(calls) > 1:
                return "a lambda with two effects"
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            if name in VAGUE:
                return f"the name {name!r} does not say what it is"
    return ""


def is_swap(target: ast.Tuple, value: ast.Tuple) -> bool:
    """Whether an assignment only changes the order of some variables."""
    return {ast.unparse(item) for item in target.elts} == {ast.unparse(item) for item in value.elts}


def is_conditional(iterable: ast.expr) -> bool:
    """Whether an iterable, maybe in a call such as enumerate, depends on a condition."""
    if isinstance(iterable, ast.Call):
        return any(is_conditional(argument) for argument in iterable.args)
    return isinstance(iterable, ast.IfExp)


def is_sequence(node: ast.expr) -> bool:
    """Whether an expression is written as a string, list or tuple."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def is_condition(node: ast.expr) -> bool:
    """Whether an expression is written as a condition."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "any", "all")
    return isinstance(node, ast.Compare | ast.BoolOp)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_idea_per_line(path):
    assert not find_problems(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "a, b = 1, {}",
        "a.x, b = c, d",
        "for x in xs if flag else (): pass",
        "y = [x for x in (xs if flag else [])]",
        "for k, x in enumerate(xs if flag else ()): pass",
        "text = 'problem' * (a != b)",
        "values = [1] * (not flag)",
        "flag and call()",
        "call() if flag else None",
        "f = lambda x: g(x) or h(x)",
        "own = 1",
        "def f(told): pass",
        "for part in parts: pass",
    ],
)
def test_the_rules_find(source):
    assert find_problems(source)


@pytest.mark.parametrize(
    "source",
    [
        "a, b = f()",
        "a, b = b, a",
        "a, *b = xs",
        "a = b = 0",
        "for x in xs: pass",
        "for k, x in enumerate(xs): pass",
        "y = [x if flag else 0 for x in xs]",
        "text = '-' * 3",
        "mask = weights * (weights > 0)",
        "f = lambda x: g(h(x))",
        "ok = a() and b()",
    ],
)
def test_the_rules_allow(source):
    assert not find_problems(source)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for problem in find_problems(Path(name).read_text()):
            print(f"{name}:{problem}")
