"""The sizes of a ``.pt2`` file: text that torch hands to sympy, which evaluates it as Python.

Torch writes ``Mul(Integer(2), Symbol('s0', integer=True))``, or ``2*s0`` before 2.8. `check_expression`
takes arithmetic of integers and symbols and nothing else, and no power that would be a number beyond bounds.
"""

import ast
import re

_FUNCTIONS = frozenset(
    {
        "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Equality", "ExprCondPair", "FloatPow", "FloatTrueDiv",
        "FloorDiv", "FloorToInt", "GreaterThan", "Identity", "IntTrueDiv", "Integer",
        "IsNonOverlappingAndDenseIndicator", "LShift", "LessThan", "Max", "Min", "Mod", "ModularIndexing", "Mul", "Not",
        "Or", "Piecewise", "Pow", "PowByNatural", "PythonMod", "RShift", "Rational", "RoundDecimal", "RoundToInt",
        "StrictGreaterThan", "StrictLessThan", "ToFloat", "TruncToFloat", "TruncToInt", "Unequality", "Where", "Xor",
        "ceiling", "floor", "sqrt",
    }
)  # fmt: skip
"""Functions of sympy and torch.utils._sympy.functions that torch writes in sizes; all are arithmetic."""

_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_LARGEST_EXPONENT = 64
_LONGEST = 20_000
_LARGEST_INTEGER = 2**64

_SYMBOL = re.compile(r"[a-z]+\d+|true|false|oo|int_oo", re.ASCII)
_TEXTS = {"Symbol": re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII), "Float": re.compile(r"[-+]?\d{1,20}(\.\d{0,40})?")}
"""The text arguments that functions may have."""

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check_expression(text: object) -> None:
    """Raise ValueError unless ``text`` is arithmetic of integers and symbols, which sympy may then evaluate."""
    try:
        _check_node(_parse(text), in_power=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as exc:
        raise ValueError(
            f"a size in it is {str(text)[:80]!r}, expected an expression of integers and symbols such as 2*s0"
        ) from exc


def _parse(text: object) -> ast.expr:
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ValueError
    return ast.parse(text.strip(), mode="eval").body


def _check_node(node: ast.expr, *, in_power: bool) -> None:
    """Raise ValueError for anything but arithmetic; a power has a small exponent, and its base is no power."""
    if _is_leaf(node):
        return
    is_power = _is_power(node)
    operands = _operands(node)
    if is_power and (in_power or not _is_small(operands[-1])):
        raise ValueError
    for operand in operands:
        _check_node(operand, in_power=in_power or is_power)


def _is_leaf(node: ast.expr) -> bool:
    """Return whether it is a number or a symbol."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, bool | float) or (isinstance(value, int) and value < _LARGEST_INTEGER)
        case ast.Name(id=name):
            return _SYMBOL.fullmatch(name) is not None
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(text))], keywords=options):
            return name in _TEXTS and _TEXTS[name].fullmatch(text) is not None and all(map(_is_option, options))
    return False


def _is_option(keyword: ast.keyword) -> bool:
    """Return whether it is an assumption on a symbol, such as positive=True, or the precision of a number."""
    return isinstance(keyword.value, ast.Constant) and type(keyword.value.value) in {bool, int}


def _is_power(node: ast.expr) -> bool:
    match node:
        case ast.BinOp(op=ast.Pow()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _POWERS
    return False


def _is_small(exponent: ast.expr) -> bool:
    """Return whether nothing in an exponent makes it large but a symbol, whose value sympy does not know."""
    numbers = [n.value for n in ast.walk(exponent) if isinstance(n, ast.Constant) and isinstance(n.value, int | float)]
    return len(numbers) <= 2 and all(number <= _LARGEST_EXPONENT for number in numbers)  # two: Rational(1, 2)


def _operands(node: ast.expr) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            return [left, right]
        case ast.UnaryOp(op=op, operand=operand) if isinstance(op, _OPERATORS):
            return [operand]
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, _COMPARISONS) for op in ops):
            return [left, *others]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            return args
    raise ValueError
