"""The bench's calls of cuBLASLt, against a library that computes on the CPU from what it is told, column-major as the real one."""

import ctypes
import itertools

import pytest

torch = pytest.importorskip("torch")

from verdigris.bench import cublaslt, problems, tensors

CPU = torch.device("cpu")


def value(argument):
    """What a pointer given by `byref` points to."""
    return argument._obj


class Library:
    """The functions that the bench calls. Objects are numbers; attributes are kept, and the product is computed from them."""

    def __init__(self, answers=5, status=0):
        self.objects, self.alive, self.asked, self.answers, self.status = {}, 0, {}, answers, status

    def __getattr__(self, name):
        if name.endswith("Create"):
            return lambda made, *arguments: self.create(value(made), arguments)
        if name.endswith("Destroy"):
            return self.destroy
        if name.endswith("SetAttribute"):
            return lambda of, attribute, given, size: self.set(of, attribute.value, value(given), size.value)
        raise AttributeError(name)

    def create(self, made, arguments):
        made.value = len(self.objects) + 1
        self.objects[made.value] = {"made": [one.value for one in arguments]}
        self.alive += 1
        return 0

    def destroy(self, one):
        self.alive -= 1
        return 0

    def set(self, of, attribute, given, size):
        assert size == ctypes.sizeof(given)
        self.objects[of.value][attribute] = given.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, wanted, found, count):
        self.asked = {"wanted": wanted.value, **self.objects[preference.value]}
        for i in range(self.answers):
            found[i].algorithm[0], found[i].workspace_bytes, found[i].state = i, 1024 * i, 1 if i == 2 else 0
        value(count).value = self.answers
        return self.status

    def cublasLtMatmul(self, handle, operation, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d, algorithm, workspace, size, stream):
        one, types = self.objects[operation.value], {number: dtype for dtype, number in cublaslt.DATA.items()}
        assert (value(alpha).value, value(beta).value) == (1, 0) and c.value == d.value

        def matrix(address, layout, transposed):
            said = self.objects[layout.value]
            kind, rows, columns, leading = said["made"]
            batch, step, dtype = said.get(5, 1), said.get(6, 0), types[kind]
            length = (batch - 1) * step + (columns - 1) * leading + rows
            bytes_of = (ctypes.c_char * (length * dtype.itemsize)).from_address(address.value)
            view = torch.frombuffer(bytes_of, dtype=dtype).as_strided((batch, rows, columns), (step, 1, leading))
            return view.transpose(1, 2) if transposed else view

        product = matrix(a, layout_a, one[3]).double() @ matrix(b, layout_b, one[4]).double()
        into = matrix(d, layout_d, False)
        into.copy_(product.to(into.dtype))
        self.ran = (value(algorithm)[0], size.value)
        return 0


SIZES = [dict(batch=1, m=5, n=7, k=9), dict(batch=3, m=4, n=6, k=8), dict(batch=1, m=5, n=7, k=9, lda=11, ldb=13, ldd=17), dict(batch=1, m=1, n=7, k=1)]


@pytest.mark.parametrize("letters, sizes", list(itertools.product(["nn", "nt", "tn", "tt"], SIZES)))
def test_rows_are_asked_for_as_columns(letters, sizes):
    row = problems.Gemm("t", "f32", letters, **sizes)
    a, b = tensors.operand_pairs(row, 1, CPU, 3)[0]
    product = cublaslt.Product(row, CPU, Library())
    torch.testing.assert_close(product.launch(0)(a, b), a @ b)


def test_every_right_answer_may_be_run_and_all_is_given_back():
    row = problems.Gemm("t", "int8", "nt", 1, 8, 8, 16)
    a, b = tensors.operand_pairs(row, 1, CPU, 3)[0]
    library = Library()
    product = cublaslt.Product(row, CPU, library)
    assert library.asked["wanted"] == 16 and library.asked[1] == cublaslt.WORKSPACE_BYTES and library.asked[5] == 256
    assert len(product.answers) == 4, "the third says that it cannot be run"
    torch.testing.assert_close(product.launch(3)(a, b), a.int() @ b.int())
    assert library.ran == (4, 4096) and product.workspace.numel() == 4096
    del product
    assert library.alive == 0


def test_what_fails_is_told():
    row = problems.Gemm("t", "bf16", "nt", 1, 8, 8, 16)
    for library in (Library(answers=0), Library(status=15)):
        with pytest.raises(cublaslt.Trouble, match="no answer"):
            cublaslt.Product(row, CPU, library)
    with pytest.raises(cublaslt.Trouble, match="status 7"):
        cublaslt.Product(row, CPU, Library(status=7))
