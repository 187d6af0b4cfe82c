"""Forwards of modules as graphs of `torch.fx`, read from their source. Nothing of a forward is run for it, as a trace would: what is drawn, counted, printed or looked up
is a node of the graph, and happens at each call as it did.

What is read is a list, and a forward that has anything else is not read: statements one behind the other, names of values, calls, operators, subscripts, attributes, and
decisions by attributes of the module other than `training`. Of a decision the branch of the day is read, and a condition is kept that says whether it still is the right one.
Functions and methods in Python that a forward calls are read likewise, and stand in the graph as if they had been written where they are called. A sum in place (`+=`) is one in the graph
too, whoever else has the tensor.
"""

import ast
import builtins
import contextlib
import inspect
import operator
import types
import warnings

import torch
from torch import fx

#: Operators of an expression that stand for a call with tensors and numbers, and change neither.
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARISONS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne}
_UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
#: What stands behind `+=` and the like, by Python's names.
_IN_PLACE = {kind: f"i{function.__name__.strip('_')}" for kind, function in _BINARY.items()}
#: Functions of Python's module `operator` that may be called by name: those that write are not among them.
OPERATORS = frozenset((*_BINARY.values(), *_COMPARISONS.values(), *_UNARY.values(), operator.getitem))
#: Python's own functions that know no more than what they are given.
_BUILTINS = {"tuple", "list", "len", "int", "float", "min", "max", "abs"}
_CONSTANTS = (type(None), bool, int, float, str, type(Ellipsis))
#: What a module of PyTorch may hold that stands for itself in a graph.
_TORCH_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
#: How far into functions of others a forward is followed.
_DEPTH = 4


class Unread(Exception):
    """A forward that has something else than what is read."""


def augmented(name, value, other):
    """`value += other`, or another of its kind: in place where the value can be written, else a new one. It is a function of its own, since the code that `torch.fx` makes of Python's
    `iadd` also gives another value to whoever else has a number or a tuple."""
    return getattr(operator, name)(value, other)


def called(function, *arguments, **keywords):
    """A call of what an attribute holds that is no module."""
    return function(*arguments, **keywords)


def listed(*values):
    """A new list, which whoever has its name may add to."""
    return list(values)


def unpacked(value, count):
    """The parts of a value that is given to so many names."""
    if isinstance(value, fx.Proxy):
        # As `torch.fx` traces the network itself.
        return tuple(value[i] for i in range(count))
    parts = tuple(value)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} values to unpack; {count} names take them")
    return parts


class _Part:
    """A module that a forward names: the one that it belongs to, or one below it."""

    def __init__(self, module, path=""):
        self.module, self.path = module, path

    def below(self, name):
        return _Part(self.module._modules[name], f"{self.path}.{name}" if self.path else name)

    def text(self):
        """How the generated code names it."""
        text = "self"
        for name in filter(None, self.path.split(".")):
            text = f"{text}.{name}" if name.isidentifier() else f"getattr({text}, {name!r})"
        return text


def _file(function):
    """The functions that a file defines, parsed and compiled, by line and name. The whole file, since what a compiler makes of a function depends on what stands around it."""
    with warnings.catch_warnings():
        # Of what stands in the file somebody was told when it was imported.
        warnings.simplefilter("ignore")
        tree = ast.parse("".join(inspect.findsource(function)[0]))
        compiled, open_ = {}, [compile(tree, "<forwards>", "exec", dont_inherit=True)]
    while open_:
        code = open_.pop()
        compiled[code.co_firstlineno, code.co_name] = code
        open_ += filter(inspect.iscode, code.co_consts)
    # Of one with a decorator the first line is that of the decorator.
    parsed = {(node.lineno, node.name): node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and not node.decorator_list}
    return {place: (node, compiled[place]) for place, node in parsed.items() if place in compiled}


def _source(function, files):
    """The syntax of a function, where its source is what it was compiled from, and shows all that it does."""
    if type(function) is not types.FunctionType or hasattr(function, "__wrapped__") or function.__code__.co_freevars:
        # A wrapper has the source of another one, and of variables of functions around it nobody knows who writes them.
        raise Unread
    code = function.__code__
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Unread
    if code.co_filename not in files:
        try:
            files[code.co_filename] = _file(function)
        except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
            files[code.co_filename] = {}
    node, made = files[code.co_filename].get((code.co_firstlineno, code.co_name), (None, None))
    if node is None or _told(made) != _told(code):
        raise Unread
    return node


def _told(code):
    """What two pieces of code have in common that do the same, wherever they stand."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_freevars
    return code.co_code, code.co_names, code.co_varnames, [repr(one) for one in code.co_consts], counts


def _of_class(kind, name):
    """What the classes of a module hold by a name: (whether there is something, what)."""
    for base in kind.__mro__:
        if name in vars(base):
            return True, vars(base)[name]
    return False, None


def _attribute(module, name):
    """What an attribute of a module is: a `Module`, the function of a method, or any other value. Those that run code of their own when they are read are not read."""
    kind = type(module)
    if name.startswith("__") or kind.__getattribute__ is not object.__getattribute__ or kind.__getattr__ is not torch.nn.Module.__getattr__:
        raise Unread
    is_there, found = _of_class(kind, name)
    is_method = type(found) is types.FunctionType
    if is_there and not is_method and hasattr(type(found), "__get__"):
        raise Unread
    # In Python's order: of the instance, of the class, and what `Module` finds then.
    own = vars(module)
    if name in own:
        return "value", own[name]
    if is_there:
        return ("method", found) if is_method else ("value", found)
    for place in (own["_parameters"], own["_buffers"], own["_modules"]):
        if name in place:
            return "value", place[name]
    raise Unread


class _Frame:
    """A function that is read: its names, and how many may be called from within."""

    def __init__(self, function, names, depth):
        self.globals, self.own, self.names, self.depth = function.__globals__, frozenset(function.__code__.co_varnames), names, depth


class Reader:
    """Reads one module's forward. Then `graph` is it, and `conditions` are expressions about `self` that are true as long as it is."""

    def __init__(self, module, files):
        self.module, self.files, self.graph, self.conditions = module, files, fx.Graph(), {}

    def read(self):
        function = type(self.module).forward
        tree = _source(function, self.files)
        names, own = self.parameters(tree), function.__defaults__ or ()
        if not names or "self" in names[1:]:
            raise Unread
        held = {names[0]: _Part(self.module)}
        for place, name in enumerate(names[1:], 1 - len(names)):
            default = inspect.Signature.empty
            if -place <= len(own):
                default = own[place]
                if type(default) not in _CONSTANTS:
                    raise Unread
            held[name] = self.graph.placeholder(name, default_value=default)
        self.graph.output(self.argument(self.body(tree, _Frame(function, held, _DEPTH))))
        # In the generated code a parameter would stand before what helpers know by the same name.
        if not {"torch", *_BUILTINS, *self.graph.python_code("self").globals}.isdisjoint(names):
            raise Unread
        return self

    @staticmethod
    def parameters(tree):
        told = tree.args
        if told.vararg or told.kwarg or told.posonlyargs or told.kwonlyargs:
            raise Unread
        return [one.arg for one in told.args]

    # Statements.

    def body(self, tree, frame):
        """What a function returns."""
        done = self.statements(tree.body, frame)
        return None if done is None else done[0]

    def statements(self, statements, frame):
        """The value that is returned in a tuple, or None where the end is reached."""
        for statement in statements:
            if isinstance(statement, ast.Return):
                return (None if statement.value is None else self.value(statement.value, frame),)
            if isinstance(statement, ast.If):
                done = self.statements(statement.body if self.decides(statement.test, frame) else statement.orelse, frame)
                if done is not None:
                    return done
                continue
            self.statement(statement, frame)
        return None

    def statement(self, statement, frame):
        if isinstance(statement, ast.Assign):
            value = self.kept(self.value(statement.value, frame))
            for target in statement.targets:
                self.bind(target, value, frame)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.value is not None:
                self.bind(statement.target, self.kept(self.value(statement.value, frame)), frame)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            value = self.argument(self.name(statement.target, frame))
            other = self.argument(self.value(statement.value, frame))
            frame.names[statement.target.id] = self.graph.call_function(augmented, (_IN_PLACE[type(statement.op)], value, other))
        elif isinstance(statement, ast.Expr):
            # A call for what it does, or a text.
            self.value(statement.value, frame)
        elif isinstance(statement, ast.Delete) and all(isinstance(target, ast.Name) and target.id in frame.names for target in statement.targets):
            for target in statement.targets:
                del frame.names[target.id]
        elif not isinstance(statement, ast.Pass):
            raise Unread

    def bind(self, target, value, frame):
        if any(isinstance(one, ast.Name) and one.id not in frame.own for one in ast.walk(target)):
            # A name of the module, or one that a function within shares, which may be said anywhere in the function.
            raise Unread
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and all(isinstance(one, ast.Name) for one in target.elts):
            if isinstance(value, fx.Node):
                parts = self.graph.call_function(unpacked, (value, len(target.elts)))
                value = tuple(self.graph.call_function(operator.getitem, (parts, i)) for i in range(len(target.elts)))
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                raise Unread
            for one, part in zip(target.elts, value):
                frame.names[one.id] = part
        else:
            raise Unread

    def kept(self, value):
        """A value that gets a name. A list is one object then, whoever adds to it."""
        if type(value) is list:
            return self.graph.call_function(listed, tuple(map(self.argument, value)))
        if type(value) is dict or type(value) is tuple and any(type(one) in (list, dict, tuple) and self.kept(one) is not one for one in value):
            raise Unread
        return value

    # Decisions.

    def decides(self, test, frame):
        """Whether a test holds, which is about attributes of modules. That it does, or does not, becomes a condition."""
        holds, text = self.decision(test, frame)
        self.conditions[text if holds else f"not ({text})"] = None
        return holds

    def decision(self, test, frame):
        if isinstance(test, ast.BoolOp):
            parts = [self.decision(one, frame) for one in test.values]
            is_all = isinstance(test.op, ast.And)
            return (all if is_all else any)(holds for holds, _ in parts), f" {'and' if is_all else 'or'} ".join(f"({text})" for _, text in parts)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            holds, text = self.decision(test.operand, frame)
            return not holds, f"not ({text})"
        if isinstance(test, ast.Compare):
            is_none = len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
            if not is_none or not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
                raise Unread
            found, text = self.decisive(test.left, frame)
            is_same = isinstance(test.ops[0], ast.Is)
            return (found is None) == is_same, f"{text} {'is' if is_same else 'is not'} None"
        found, text = self.decisive(test, frame)
        if not (found is None or isinstance(found, (bool, int, float, str, torch.nn.Module))):
            raise Unread
        return bool(found), text

    def decisive(self, test, frame):
        """An attribute that something is decided by, and how code names it."""
        if not isinstance(test, ast.Attribute) or not isinstance(test.value, ast.Name) or test.attr == "training":
            raise Unread
        part = frame.names.get(test.value.id)
        if not isinstance(part, _Part):
            raise Unread
        kind, found = _attribute(part.module, test.attr)
        if kind != "value":
            raise Unread
        return found, f"{part.text()}.{test.attr}"

    # Expressions.

    def argument(self, value):
        """A value as an argument of a node."""
        if isinstance(value, _Part):
            if not value.path:
                raise Unread
            return self.graph.get_attr(value.path)
        if type(value) in (tuple, list):
            return type(value)(map(self.argument, value))
        if type(value) is dict:
            return {key: self.argument(one) for key, one in value.items()}
        return value

    def value(self, node, frame):
        read = getattr(self, f"read_{type(node).__name__}", None)
        if read is None:
            raise Unread
        return read(node, frame)

    def read_Constant(self, node, frame):
        if type(node.value) not in _CONSTANTS:
            raise Unread
        return node.value

    def read_Name(self, node, frame):
        return self.name(node, frame)

    def name(self, node, frame):
        if node.id in frame.names:
            return frame.names[node.id]
        return self.constant(node, frame)

    def constant(self, node, frame):
        found = self.outer(node, frame)
        if type(found) not in _TORCH_CONSTANTS:
            raise Unread
        return found

    def outer(self, node, frame):
        """What a name, or a name of a module with attributes behind it, stands for outside of the function."""
        if isinstance(node, ast.Attribute):
            room = self.outer(node.value, frame)
            if not isinstance(room, types.ModuleType) or node.attr not in vars(room):
                raise Unread
            return vars(room)[node.attr]
        if not isinstance(node, ast.Name) or node.id in frame.own:
            raise Unread
        if node.id in frame.globals:
            return frame.globals[node.id]
        if node.id in _BUILTINS and frame.globals.get("__builtins__") in (builtins, vars(builtins)):
            return vars(builtins)[node.id]
        raise Unread

    @staticmethod
    def is_outer(node, frame):
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in frame.own

    def read_Attribute(self, node, frame):
        if self.is_outer(node, frame):
            return self.constant(node, frame)
        value = self.value(node.value, frame)
        if node.attr.startswith("__"):
            raise Unread
        if isinstance(value, _Part):
            kind, found = _attribute(value.module, node.attr)
            if kind != "value":
                raise Unread
            if isinstance(found, torch.nn.Module):
                if value.module._modules.get(node.attr) is not found:
                    raise Unread
                return value.below(node.attr)
            # It is read at each call.
            return self.graph.get_attr(f"{value.path}.{node.attr}" if value.path else node.attr)
        if not isinstance(value, fx.Node):
            raise Unread
        return self.graph.call_function(getattr, (value, node.attr))

    def read_Subscript(self, node, frame):
        value = self.value(node.value, frame)
        if isinstance(value, _Part):
            # A module out of a list of them.
            index = node.slice.value if isinstance(node.slice, ast.Constant) else None
            names = list(value.module._modules)
            if type(value.module) not in _LISTS or type(index) is not int or not 0 <= index < len(names) or names[index] != str(index):
                raise Unread
            return value.below(names[index])
        if not isinstance(value, fx.Node):
            raise Unread
        return self.graph.call_function(operator.getitem, (value, self.argument(self.index(node.slice, frame))))

    def index(self, node, frame):
        if isinstance(node, ast.Tuple):
            return tuple(self.index(one, frame) for one in node.elts)
        if isinstance(node, ast.Slice):
            return slice(*(None if one is None else self.argument(self.value(one, frame)) for one in (node.lower, node.upper, node.step)))
        return self.value(node, frame)

    def read_Tuple(self, node, frame):
        return tuple(self.value(one, frame) for one in node.elts)

    def read_List(self, node, frame):
        return [self.value(one, frame) for one in node.elts]

    def read_Dict(self, node, frame):
        if not all(isinstance(key, ast.Constant) and type(key.value) is str for key in node.keys):
            raise Unread
        return {key.value: self.value(one, frame) for key, one in zip(node.keys, node.values)}

    def read_BinOp(self, node, frame):
        left, right = (self.argument(self.value(one, frame)) for one in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and not isinstance(left, fx.Node):
            # The code that `torch.fx` makes has no parentheses around a number below 0.
            raise Unread
        return self.graph.call_function(_BINARY[type(node.op)], (left, right))

    def read_UnaryOp(self, node, frame):
        if type(node.op) not in _UNARY:
            raise Unread
        value = self.argument(self.value(node.operand, frame))
        if isinstance(node.op, ast.USub) and type(value) in (int, float):
            return -value
        return self.graph.call_function(_UNARY[type(node.op)], (value,))

    def read_Compare(self, node, frame):
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARISONS:
            raise Unread
        left, right = (self.argument(self.value(one, frame)) for one in (node.left, node.comparators[0]))
        return self.graph.call_function(_COMPARISONS[type(node.ops[0])], (left, right))

    def read_IfExp(self, node, frame):
        return self.value(node.body if self.decides(node.test, frame) else node.orelse, frame)

    # Calls.

    def read_Call(self, node, frame):
        if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
            raise Unread
        if self.is_outer(node.func, frame):
            found = self.outer(node.func, frame)
            if self.is_taken(found):
                return self.graph.call_function(found, *self.arguments(node, frame))
            return self.inlined(found, (), node, frame)
        if isinstance(node.func, ast.Attribute):
            value, name = self.value(node.func.value, frame), node.func.attr
            if isinstance(value, _Part):
                return self.of_module(value, name, node, frame)
            if not isinstance(value, fx.Node) or name.startswith("__"):
                raise Unread
            arguments, keywords = self.arguments(node, frame)
            return self.graph.call_method(name, (value, *arguments), keywords)
        value = self.value(node.func, frame)
        if not isinstance(value, _Part) or not value.path:
            raise Unread
        return self.graph.call_module(value.path, *self.arguments(node, frame))

    @staticmethod
    def is_taken(found):
        """Whether a function is a node by itself: PyTorch's, ours, and those of Python that write nothing."""
        if any(found is vars(builtins)[name] for name in _BUILTINS):
            return True
        if not inspect.isroutine(found):
            return False
        room = getattr(found, "__module__", None) or ""
        return room.split(".")[0] in ("torch", __name__.split(".")[0]) or found in OPERATORS or inspect.isbuiltin(found) and room.startswith("torch")

    def arguments(self, node, frame):
        given = tuple(self.argument(self.value(one, frame)) for one in node.args)
        return given, {one.arg: self.argument(self.value(one.value, frame)) for one in node.keywords}

    def of_module(self, part, name, node, frame):
        """A call of what a module has by a name."""
        kind, found = _attribute(part.module, name)
        if kind == "method":
            if name == "forward":
                raise Unread
            # As long as the instance has none of its own.
            self.conditions[f"{name!r} not in {part.text()}.__dict__"] = None
            return self.inlined(found, (part,), node, frame)
        if isinstance(found, torch.nn.Module):
            if part.module._modules.get(name) is not found:
                raise Unread
            return self.graph.call_module(part.below(name).path, *self.arguments(node, frame))
        function = self.graph.get_attr(f"{part.path}.{name}" if part.path else name)
        arguments, keywords = self.arguments(node, frame)
        return self.graph.call_function(called, (function, *arguments), keywords)

    def inlined(self, function, before, node, frame):
        """What a function in Python returns, as if it stood where it is called."""
        if frame.depth == 0 or type(function) is not types.FunctionType:
            raise Unread
        tree = _source(function, self.files)
        names, own = self.parameters(tree), function.__defaults__ or ()
        given = (*before, *(self.kept(self.value(one, frame)) for one in node.args))
        held = dict(zip(names, given))
        for one in node.keywords:
            if one.arg in held or one.arg not in names:
                raise Unread
            held[one.arg] = self.kept(self.value(one.value, frame))
        for name, default in zip(names[len(names) - len(own) :], own):
            if name not in held and type(default) not in _CONSTANTS:
                raise Unread
            held.setdefault(name, default)
        if len(given) > len(names) or len(held) != len(names):
            raise Unread
        return self.body(tree, _Frame(function, held, frame.depth - 1))


def read(module, files):
    """The `Reader` of a module's forward that has read it, or None where it is not read. `files` keeps what was parsed."""
    with contextlib.suppress(Unread, RecursionError):
        return Reader(module, files).read()
    return None
