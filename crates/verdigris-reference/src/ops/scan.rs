//! Scans: a row at a time, each result from all elements that go into it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use verdigris_graph::{Error, Pointwise, Scan, ScanOp};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::fuzz::{Draft, TYPES};
use crate::operation::{Evaluation, GraphError, Operation};
use crate::ops::reduction::{Greatest, ProductInAnyOrder, SumInAnyOrder};
use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

/// `ln Σ e^x` of values that may carry errors, two by two in any order.
#[derive(Clone, Copy, Debug)]
struct LogSumExpInAnyOrder {
    /// The greatest, and the sum of exponentials under it.
    greatest: f64,
    sum: f64,
    has_nan: bool,
    /// The greatest magnitude and error of a finite element, and how many there are.
    magnitude: f64,
    error: f64,
    count: f64,
}

impl LogSumExpInAnyOrder {
    const NOTHING: LogSumExpInAnyOrder =
        LogSumExpInAnyOrder { greatest: f64::NEG_INFINITY, sum: 0.0, has_nan: false, magnitude: 0.0, error: 0.0, count: 0.0 };

    fn take(&mut self, x: Bounded) {
        self.has_nan |= x.value.is_nan();
        self.error = self.error.max(x.error);
        if !x.value.is_finite() {
            self.greatest = self.greatest.max(x.value);
            return;
        }
        self.magnitude = self.magnitude.max(x.value.abs() + x.error);
        self.count += 1.0;
        if x.value > self.greatest {
            self.sum = self.sum * (self.greatest - x.value).exp() + 1.0;
            self.greatest = x.value;
        } else if self.greatest.is_finite() {
            self.sum += (x.value - self.greatest).exp();
        }
    }

    /// Two values are joined with an error of a few units of their size; what is joined is a mean of errors with weights that sum to 1, so that errors
    /// of `K` joins add up at most.
    fn finish(self, compute: DType) -> Bounded {
        if self.error == f64::INFINITY {
            return Bounded { value: self.greatest, error: f64::INFINITY };
        }
        if self.has_nan {
            return Bounded::exact(f64::NAN);
        }
        if !self.greatest.is_finite() {
            return Bounded::exact(self.greatest);
        }
        let value = self.greatest + self.sum.ln();
        let unit = if compute == DType::F64 { power_of_two(-49) } else { power_of_two(-22) };
        let rounding = if self.count > 1.0 { self.count * unit * (self.magnitude + self.count.ln() + 1.0) } else { 0.0 };
        Bounded::new(value, self.error + rounding, compute)
    }
}

/// What is known of the elements so far.
#[derive(Clone, Copy, Debug)]
enum Running {
    Add(SumInAnyOrder),
    Mul(ProductInAnyOrder),
    Min(Greatest),
    Max(Greatest),
    LogSumExp(LogSumExpInAnyOrder),
}

impl Running {
    fn new(f: ScanOp) -> Running {
        let nothing = Greatest::of_nothing(f64::NEG_INFINITY);
        match f {
            ScanOp::Add => Running::Add(SumInAnyOrder::default()),
            ScanOp::Mul => Running::Mul(ProductInAnyOrder::default()),
            ScanOp::Min => Running::Min(nothing),
            ScanOp::Max => Running::Max(nothing),
            ScanOp::LogSumExp => Running::LogSumExp(LogSumExpInAnyOrder::NOTHING),
        }
    }

    fn take(&mut self, x: Bounded) {
        match self {
            Running::Add(sum) => sum.add(x),
            Running::Mul(product) => product.multiply(x),
            Running::Min(greatest) => greatest.take(x.negated()),
            Running::Max(greatest) => greatest.take(x),
            Running::LogSumExp(sum) => sum.take(x),
        }
    }

    fn finish(self, compute: DType) -> Bounded {
        match self {
            Running::Add(sum) => sum.finish(compute),
            Running::Mul(product) => product.finish(compute),
            Running::Min(greatest) => greatest.finish().negated(),
            Running::Max(greatest) => greatest.finish(),
            Running::LogSumExp(sum) => sum.finish(compute),
        }
    }
}

/// A scan with what it reads.
struct Scanned<'a> {
    scan: Scan,
    x: Source<'a>,
    compute: DType,
    /// The results of the rows that were asked for, by the offset of the first element.
    known: RefCell<HashMap<u64, Rc<Vec<Bounded>>>>,
}

impl Scanned<'_> {
    fn row(&self, first: u64) -> Rc<Vec<Bounded>> {
        if let Some(row) = self.known.borrow().get(&first) {
            return Rc::clone(row);
        }
        let axis = self.scan.axis as usize;
        let (extent, step) = (self.x.dims()[axis], self.x.strides()[axis]);
        let mut results = vec![Bounded::exact(0.0); extent as usize];
        let mut running = Running::new(self.scan.f);
        for turn in 0..extent {
            let place = if self.scan.reverse { extent - 1 - turn } else { turn };
            let before = running;
            running.take(self.x.read(first + place * step, self.compute));
            results[place as usize] = if self.scan.exclusive { before } else { running }.finish(self.compute);
        }
        let row = Rc::new(results);
        self.known.borrow_mut().insert(first, Rc::clone(&row));
        row
    }
}

impl Formula for Scanned<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let axis = self.scan.axis as usize;
        let mut first = index.to_vec();
        let place = std::mem::take(&mut first[axis]);
        self.row(self.x.offset(&first))[place as usize]
    }

    fn compute(&self) -> DType {
        self.compute
    }
}

impl Operation for Scan {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let x = at.source(self.x)?;
        let compute = Pointwise::compute_dtype([x.dtype()]);
        at.put(self.y, Scanned { scan: self.clone(), x, compute, known: RefCell::default() })
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.scan()
    }
}

impl Draft {
    fn scan(&mut self) -> Result<(), Error> {
        let f = self.pick(&ScanOp::ALL);
        let is_float = f == ScanOp::LogSumExp;
        let x = self.with_axis(is_float)?;
        let axis = self.below(x.dims.len() as u64) as u32;
        let (exclusive, reverse) = (self.one_in(2), self.one_in(2));
        let name = self.name("scan");
        let y = self.builder.scan(&name, f, x.uid, axis, exclusive, reverse)?;
        self.note_read(&[x.uid]);
        if !is_float {
            return self.pointwise_result(y, &x.dims, &[x.dtype]);
        }
        let compute = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        self.result(y, &x.dims, compute, &TYPES[..10]).map(drop)
    }
}
