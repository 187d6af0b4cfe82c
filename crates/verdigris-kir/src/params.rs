//! Kernel parameters by name and type: one declaration says what a kernel reads, what a launch gives, and what each buffer's address is a
//! multiple of.
//!
//! A [`Parameter`] is a number, a divisor, a pointer, a tensor map, or a group of them. [`parameters!`](crate::parameters) declares a group
//! once and makes both sides of it: a structure of values that the kernel reads, and a structure of arguments that a launch fills in. An
//! argument that is missing, given twice or of another type does not compile. What only a spec decides (an operand that is there or not, how
//! many there are of a kind) is checked where the launch is made and refused by name ([`Launch::check`](crate::program::Launch::check)).
//!
//! ```
//! use verdigris_kir::face::{Header, Kernel, build};
//! use verdigris_kir::ir::Target;
//! use verdigris_kir::params::{Divide, Parameter, Read, Write};
//! use verdigris_kir::program::Address;
//!
//! /// What shapes the kernel.
//! struct Spec {
//!     has_bias: bool,
//! }
//!
//! verdigris_kir::parameters! {
//!     /// Rows with a bias.
//!     struct Rows / RowsArguments of Spec as spec {
//!         /// Elements of a row.
//!         extent: Divide,
//!         /// All elements.
//!         elements: u32,
//!         x: Read = 4,
//!         bias: Option<Read> = spec.has_bias.then_some(4),
//!         y: Write = 4,
//!     }
//! }
//!
//! let spec = Spec { has_bias: true };
//! let header = Header { name: "rows".into(), target: Target::Sm80, threads: 32, min_ctas: 1, cluster: 1 };
//! let kernel = build(header, |k| {
//!     let Rows { extent, elements, x, bias, y } = Rows::declare(k, &spec);
//!     k.when(k.thread().lt(elements), || {
//!         let at = k.thread();
//!         let x = k.ld_global::<f32>(x.at(at, 4), 0);
//!         let bias = bias.expect("this spec has one").at(extent.split(at).1, 4);
//!         k.st_global(y.at(at, 4), 0, x + k.ld_global::<f32>(bias, 0));
//!     });
//! });
//! let arguments = RowsArguments {
//!     extent: 8,
//!     elements: 24,
//!     x: Address::buffer(0),
//!     bias: Some(Address::buffer(1)),
//!     y: Address::buffer(2),
//! };
//! let bound = arguments.bound(&spec);
//! assert_eq!(bound.names().collect::<Vec<_>>(), ["extent", "elements", "x", "bias", "y"]);
//! assert_eq!(kernel.params.len(), bound.len());
//! ```

use std::fmt;
use std::ops::Deref;

use crate::face::{Divisor, Kernel, Pointer, Scalar, TensorMap, TensorMapTemplate, Val};
use crate::ir::MapDecl;
use crate::program::{Address, Arg, Base, MapSpec};

/// One parameter of a kernel, or a group of them.
pub trait Parameter {
    /// What the declaration is made from: nothing for a number, an alignment in bytes for a pointer, the declaration of a tensor map, the spec of a
    /// group.
    type Spec;
    /// What the kernel reads.
    type Value<'k>;
    /// What a launch gives.
    type Argument;

    /// Declares it, and reads it.
    fn declare<'k>(k: Kernel<'k>, name: &'static str, spec: &Self::Spec) -> Self::Value<'k>;

    /// Adds the argument to those of a launch, in the order of [`Parameter::declare`].
    fn bind(argument: Self::Argument, name: &'static str, spec: &Self::Spec, to: &mut Arguments);
}

/// A number that the host divides by in advance: [`Divisor`] in the kernel, at least 1 at launch.
#[derive(Clone, Copy, Debug)]
pub enum Divide {}

/// Global memory that the kernel only reads. The spec is the alignment in bytes that it relies on.
#[derive(Clone, Copy, Debug)]
pub enum Read {}

/// Global memory that the kernel only writes. The spec is the alignment in bytes that it relies on.
#[derive(Clone, Copy, Debug)]
pub enum Write {}

/// Global memory that the kernel reads and writes. The spec is the alignment in bytes that it relies on.
#[derive(Clone, Copy, Debug)]
pub enum ReadWrite {}

/// A tensor map. The spec is its declaration; a launch gives the address with extents and strides.
#[derive(Clone, Copy, Debug)]
pub enum Map {}

/// A tensor map of which the kernel makes changed copies. The spec is its declaration.
#[derive(Clone, Copy, Debug)]
pub enum MapTemplate {}

/// A number of type `T` that may be known only at execution.
#[derive(Clone, Copy, Debug)]
pub struct AtExecution<T>(std::marker::PhantomData<T>);

/// The argument of [`AtExecution`]: an `f64` for real numbers, rounded to the parameter's type, and the type itself for integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HostNumber<T = f64> {
    /// The same at each execution.
    Fixed(T),
    /// Given at each execution: an index into its host scalars.
    Bound(usize),
}

/// A number of type `T` that a kernel takes by value or reads from device memory, as the spec says. In memory it may change between replays of a
/// captured graph, which keep the values of their parameters: the seed and the offset of random numbers stand there.
///
/// The kernel reads it where it is declared. One that overlaps the launch in front ([`Launch::overlap`](crate::program::Launch::overlap)) relies on that
/// launch not writing it.
///
/// ```
/// use verdigris_kir::face::{Header, build};
/// use verdigris_kir::ir::Target;
/// use verdigris_kir::params::{Source, Value, ValueOf, Write};
/// use verdigris_kir::program::Address;
///
/// verdigris_kir::parameters! {
///     /// A number for each thread.
///     struct Random / RandomArguments of Source as seed_from {
///         seed: Value<u64> = *seed_from,
///         y: Write = 8,
///     }
/// }
///
/// let kernel = |seed_from: Source| {
///     let header = Header { name: "random".into(), target: Target::Sm80, threads: 32, min_ctas: 1, cluster: 1 };
///     build(header, |k| {
///         let Random { seed, y } = Random::declare(k, &seed_from);
///         k.st_global(y.at(k.thread(), 8), 0, seed);
///     })
/// };
/// let by_value = RandomArguments { seed: ValueOf::Bound(0), y: Address::buffer(0) }.bound(&Source::Argument);
/// let in_memory = RandomArguments { seed: ValueOf::Memory(Address::buffer(1)), y: Address::buffer(0) }.bound(&Source::Memory);
/// assert_ne!(kernel(Source::Argument).params[0].kind, kernel(Source::Memory).params[0].kind);
/// assert_eq!((by_value.refusal(), in_memory.refusal()), (None, None));
/// let mixed = RandomArguments { seed: ValueOf::Fixed(7), y: Address::buffer(0) }.bound(&Source::Memory);
/// assert_eq!(mixed.refusal(), Some("parameter seed is given by value, and this spec reads it from device memory"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Value<T>(std::marker::PhantomData<T>);

/// Where a [`Value`] comes from: a part of a kernel's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// A parameter.
    Argument,
    /// Device memory that a parameter points to.
    Memory,
}

/// The argument of [`Value`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValueOf<T> {
    /// The same at each execution.
    Fixed(T),
    /// Given at each execution: an index into its host scalars.
    Bound(usize),
    /// At this address, which is a multiple of the type's bytes.
    Memory(Address),
}

macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl Parameter for $ty {
            type Spec = ();
            type Value<'k> = Val<'k, $ty>;
            type Argument = $ty;

            #[track_caller]
            fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> Val<'k, $ty> {
                k.scalar(name)
            }

            fn bind(argument: $ty, name: &'static str, (): &(), to: &mut Arguments) {
                to.push(name, 1, Arg::Scalar(<$ty as Scalar>::TY, argument.bits()));
            }
        }
    )*};
}
numbers!(u32, i32, u64, i64, f32, f64);

macro_rules! at_execution {
    ($($ty:ident from $given:ty: $rounded:expr),*) => {$(
        impl Parameter for AtExecution<$ty> {
            type Spec = ();
            type Value<'k> = Val<'k, $ty>;
            type Argument = HostNumber<$given>;

            #[track_caller]
            fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> Val<'k, $ty> {
                k.scalar(name)
            }

            fn bind(argument: HostNumber<$given>, name: &'static str, (): &(), to: &mut Arguments) {
                match argument {
                    HostNumber::Fixed(value) => to.push(name, 1, Arg::Scalar(<$ty as Scalar>::TY, $rounded(value).bits())),
                    HostNumber::Bound(index) => to.push(name, 1, Arg::HostScalar(<$ty as Scalar>::TY, index)),
                }
            }
        }

        impl Parameter for Value<$ty> {
            type Spec = Source;
            type Value<'k> = Val<'k, $ty>;
            type Argument = ValueOf<$ty>;

            #[track_caller]
            fn declare<'k>(k: Kernel<'k>, name: &'static str, source: &Source) -> Val<'k, $ty> {
                match source {
                    Source::Argument => k.scalar(name),
                    Source::Memory => k.ld_global(k.input(name, value_bytes::<$ty>()).address(), 0),
                }
            }

            fn bind(argument: ValueOf<$ty>, name: &'static str, source: &Source, to: &mut Arguments) {
                match (argument, source) {
                    (ValueOf::Fixed(value), Source::Argument) => to.push(name, 1, Arg::Scalar(<$ty as Scalar>::TY, value.bits())),
                    (ValueOf::Bound(index), Source::Argument) => to.push(name, 1, Arg::HostScalar(<$ty as Scalar>::TY, index)),
                    (ValueOf::Memory(address), Source::Memory) => to.push(name, value_bytes::<$ty>(), Arg::Pointer(address)),
                    (ValueOf::Memory(_), Source::Argument) => {
                        to.refuse(format!("parameter {name} is given in device memory, and this spec takes it by value"));
                    }
                    (ValueOf::Fixed(_) | ValueOf::Bound(_), Source::Memory) => {
                        to.refuse(format!("parameter {name} is given by value, and this spec reads it from device memory"));
                    }
                }
            }
        }
    )*};
}
at_execution!(
    f32 from f64: |value: f64| value as f32, f64 from f64: std::convert::identity, u32 from u32: std::convert::identity,
    i32 from i32: std::convert::identity, u64 from u64: std::convert::identity, i64 from i64: std::convert::identity
);

/// Bytes of a number in memory, of which its address is a multiple.
const fn value_bytes<T>() -> u32 {
    size_of::<T>() as u32
}

impl Parameter for Divide {
    type Spec = ();
    type Value<'k> = Divisor<'k>;
    type Argument = u32;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> Divisor<'k> {
        k.divisor(name)
    }

    fn bind(argument: u32, name: &'static str, (): &(), to: &mut Arguments) {
        to.push(name, 1, Arg::Divisor(argument));
    }
}

macro_rules! pointers {
    ($($kind:ty: $verb:ident),*) => {$(
        impl Parameter for $kind {
            type Spec = u32;
            type Value<'k> = Pointer<'k>;
            type Argument = Address;

            #[track_caller]
            fn declare<'k>(k: Kernel<'k>, name: &'static str, alignment_bytes: &u32) -> Pointer<'k> {
                k.$verb(name, *alignment_bytes)
            }

            fn bind(argument: Address, name: &'static str, alignment_bytes: &u32, to: &mut Arguments) {
                to.push(name, *alignment_bytes, Arg::Pointer(argument));
            }
        }
    )*};
}
pointers!(Read: input, Write: output, ReadWrite: in_out);

/// What the address under a tensor map is a multiple of.
const MAPPED_ALIGNMENT_BYTES: u32 = 16;

macro_rules! maps {
    ($($kind:ty: $verb:ident -> $value:ident),*) => {$(
        impl Parameter for $kind {
            type Spec = MapDecl;
            type Value<'k> = $value<'k>;
            type Argument = (Address, MapSpec);

            #[track_caller]
            fn declare<'k>(k: Kernel<'k>, name: &'static str, decl: &MapDecl) -> $value<'k> {
                k.$verb(name, decl.clone())
            }

            fn bind((address, spec): (Address, MapSpec), name: &'static str, _: &MapDecl, to: &mut Arguments) {
                to.push(name, MAPPED_ALIGNMENT_BYTES, Arg::TensorMap(address, spec));
            }
        }
    )*};
}
maps!(Map: tensor_map -> TensorMap, MapTemplate: tensor_map_template -> TensorMapTemplate);

/// As many of one kind as the length says, under one spec.
impl<P: Parameter, const N: usize> Parameter for [P; N] {
    type Spec = P::Spec;
    type Value<'k> = [P::Value<'k>; N];
    type Argument = [P::Argument; N];

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, spec: &P::Spec) -> [P::Value<'k>; N] {
        // A loop, for `#[track_caller]` does not reach into closures.
        let mut values = Vec::with_capacity(N);
        for _ in 0..N {
            values.push(P::declare(k, name, spec));
        }
        match values.try_into() {
            Ok(values) => values,
            Err(_) => unreachable!("as many were declared as the array holds"),
        }
    }

    fn bind(argument: [P::Argument; N], name: &'static str, spec: &P::Spec, to: &mut Arguments) {
        for argument in argument {
            P::bind(argument, name, spec, to);
        }
    }
}

/// One for each spec.
impl<P: Parameter> Parameter for Vec<P> {
    type Spec = Vec<P::Spec>;
    type Value<'k> = Vec<P::Value<'k>>;
    type Argument = Vec<P::Argument>;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, specs: &Vec<P::Spec>) -> Vec<P::Value<'k>> {
        let mut values = Vec::with_capacity(specs.len());
        for spec in specs {
            values.push(P::declare(k, name, spec));
        }
        values
    }

    fn bind(argument: Vec<P::Argument>, name: &'static str, specs: &Vec<P::Spec>, to: &mut Arguments) {
        if argument.len() != specs.len() {
            to.refuse(format!("{} of parameter {name} given, {} declared", argument.len(), specs.len()));
        }
        for (argument, spec) in argument.into_iter().zip(specs) {
            P::bind(argument, name, spec, to);
        }
    }
}

/// Declared where there is a spec; given where it is declared.
impl<P: Parameter> Parameter for Option<P> {
    type Spec = Option<P::Spec>;
    type Value<'k> = Option<P::Value<'k>>;
    type Argument = Option<P::Argument>;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, spec: &Option<P::Spec>) -> Option<P::Value<'k>> {
        match spec {
            Some(spec) => Some(P::declare(k, name, spec)),
            None => None,
        }
    }

    fn bind(argument: Option<P::Argument>, name: &'static str, spec: &Option<P::Spec>, to: &mut Arguments) {
        match (argument, spec) {
            (Some(argument), Some(spec)) => P::bind(argument, name, spec, to),
            (None, None) => {}
            (Some(_), None) => to.refuse(format!("parameter {name} is given, and this spec has none")),
            (None, Some(_)) => to.refuse(format!("parameter {name} is missing, and this spec has one")),
        }
    }
}

/// The arguments of a launch, in the order of the kernel's parameters, each with the name of its parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arguments {
    args: Vec<Arg>,
    names: Vec<&'static str>,
    alignments_bytes: Vec<u32>,
    refused: Option<String>,
}

impl Arguments {
    /// No arguments.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what `P` takes: a parameter, or a group of them.
    pub fn bind<P: Parameter>(&mut self, name: &'static str, spec: &P::Spec, argument: P::Argument) -> &mut Self {
        P::bind(argument, name, spec, self);
        self
    }

    /// Adds the arguments of another group, behind those that stand here.
    pub fn append(&mut self, other: Arguments) {
        self.args.extend(other.args);
        self.names.extend(other.names);
        self.alignments_bytes.extend(other.alignments_bytes);
        self.refused = self.refused.take().or(other.refused);
    }

    pub(crate) fn push(&mut self, name: &'static str, alignment_bytes: u32, arg: Arg) {
        self.args.push(arg);
        self.names.push(name);
        self.alignments_bytes.push(alignment_bytes);
    }

    fn refuse(&mut self, why: String) {
        self.refused.get_or_insert(why);
    }

    /// The parameters' names, in order; empty where an argument was given by position alone.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.names.iter().copied()
    }

    /// What disagreed with the declarations when these were bound.
    pub fn refusal(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// For each argument that points into a buffer of the caller's: the slot, the distance from its start, and what their sum is a multiple of,
    /// in bytes.
    pub fn buffers(&self) -> impl Iterator<Item = (usize, u64, u32)> + '_ {
        self.args.iter().zip(&self.alignments_bytes).filter_map(|(arg, &alignment_bytes)| match arg {
            Arg::Pointer(Address { base: Base::Buffer(slot), offset_bytes })
            | Arg::TensorMap(Address { base: Base::Buffer(slot), offset_bytes }, _) => Some((*slot, *offset_bytes, alignment_bytes)),
            _ => None,
        })
    }

    /// The addresses among the arguments.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.args.iter().filter_map(|arg| match arg {
            Arg::Pointer(address) | Arg::TensorMap(address, _) => Some(address),
            _ => None,
        })
    }

    /// The addresses among the arguments, for a program that becomes part of a larger one.
    pub fn addresses_mut(&mut self) -> impl Iterator<Item = &mut Address> {
        self.args_mut().filter_map(|arg| match arg {
            Arg::Pointer(address) | Arg::TensorMap(address, _) => Some(address),
            _ => None,
        })
    }

    pub(crate) fn args_mut(&mut self) -> impl Iterator<Item = &mut Arg> {
        self.args.iter_mut()
    }
}

/// Arguments by position alone, of which [`Launch::check`](crate::program::Launch::check) sees the types and not the names: of kernels that declare
/// their parameters one by one, as those of tests do.
impl From<Vec<Arg>> for Arguments {
    fn from(args: Vec<Arg>) -> Self {
        let count = args.len();
        Arguments { args, names: vec![""; count], alignments_bytes: vec![1; count], refused: None }
    }
}

impl Deref for Arguments {
    type Target = [Arg];

    fn deref(&self) -> &[Arg] {
        &self.args
    }
}

impl IntoIterator for Arguments {
    type Item = Arg;
    type IntoIter = std::vec::IntoIter<Arg>;

    fn into_iter(self) -> Self::IntoIter {
        self.args.into_iter()
    }
}

impl fmt::Display for Arguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, arg)) in self.names.iter().zip(&self.args).enumerate() {
            write!(f, "{}{name}: {arg:?}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Declares a group of parameters once, and makes both of its sides.
///
/// `struct Value / Argument of Spec as spec { name: Kind = of_spec, … }` makes `struct Value<'k>`, which the kernel declares by `Value::declare(k, &spec)`,
/// and `struct Argument`, which a launch fills in and binds by `argument.bound(&spec)`. `Argument` is itself a [`Parameter`](crate::params::Parameter), so
/// groups may stand in groups. What follows `=` is the [`Parameter::Spec`](crate::params::Parameter::Spec) of the field, worked out from `spec`; numbers
/// have none. Attributes in front of `Argument`, such as derives, are that structure's. [The module](crate::params) has an example.
///
/// An argument that is missing does not compile:
///
/// ```compile_fail,E0063
/// verdigris_kir::parameters! {
///     struct Pair / PairArguments of () as _spec { first: u32, second: u32, }
/// }
/// let arguments = PairArguments { first: 1 };
/// ```
///
/// nor one given twice, nor one of another type:
///
/// ```compile_fail,E0062
/// verdigris_kir::parameters! {
///     struct Pair / PairArguments of () as _spec { first: u32, second: u32, }
/// }
/// let arguments = PairArguments { first: 1, second: 2, second: 3 };
/// ```
///
/// ```compile_fail,E0308
/// verdigris_kir::parameters! {
///     struct Pair / PairArguments of () as _spec { first: u32, second: u32, }
/// }
/// let arguments = PairArguments { first: 1u32, second: 2u64 };
/// ```
#[macro_export]
macro_rules! parameters {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Value:ident / $(#[$argument_meta:meta])* $Argument:ident of $Spec:ty as $spec:ident {
            $( $(#[$field_meta:meta])* $field_vis:vis $field:ident : $Kind:ty $(= $of_spec:expr)? ),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[allow(dead_code, missing_docs, reason = "a kernel may declare what only some of its specs read")]
        $vis struct $Value<'k> {
            $( $(#[$field_meta])* $field_vis $field: <$Kind as $crate::params::Parameter>::Value<'k>, )*
        }

        #[doc = concat!("What a launch gives for [`", stringify!($Value), "`].")]
        $(#[$argument_meta])*
        $vis struct $Argument {
            $( $(#[$field_meta])* $field_vis $field: <$Kind as $crate::params::Parameter>::Argument, )*
        }

        #[allow(dead_code, reason = "a group inside of another is declared and bound by that one")]
        impl<'k> $Value<'k> {
            /// Declares the parameters, in the order of the fields.
            #[track_caller]
            $vis fn declare(k: $crate::face::Kernel<'k>, $spec: &$Spec) -> Self {
                <$Argument as $crate::params::Parameter>::declare(k, "", $spec)
            }
        }

        #[allow(dead_code, reason = "a group inside of another is declared and bound by that one")]
        impl $Argument {
            /// The arguments of a launch of the kernel that was declared with `spec`.
            $vis fn bound(self, $spec: &$Spec) -> $crate::params::Arguments {
                let mut arguments = $crate::params::Arguments::new();
                <$Argument as $crate::params::Parameter>::bind(self, "", $spec, &mut arguments);
                arguments
            }
        }

        impl $crate::params::Parameter for $Argument {
            type Spec = $Spec;
            type Value<'k> = $Value<'k>;
            type Argument = $Argument;

            #[track_caller]
            fn declare<'k>(k: $crate::face::Kernel<'k>, _: &'static str, $spec: &$Spec) -> $Value<'k> {
                $Value {
                    $( $field: <$Kind as $crate::params::Parameter>::declare(
                        k, stringify!($field), $crate::parameters!(@spec $($of_spec)?),
                    ), )*
                }
            }

            fn bind(argument: $Argument, _: &'static str, $spec: &$Spec, to: &mut $crate::params::Arguments) {
                $( <$Kind as $crate::params::Parameter>::bind(
                    argument.$field, stringify!($field), $crate::parameters!(@spec $($of_spec)?), to,
                ); )*
            }
        }
    };
    (@spec) => { &() };
    (@spec $of_spec:expr) => { &$of_spec };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::face::{Header, build};
    use crate::ir::{KernelBody, Target};
    use crate::program::{KernelRef, Launch, Program, Residency};

    struct Spec {
        weighted: bool,
        factors: usize,
    }

    crate::parameters! {
        /// Numbers inside of a group.
        struct Pair / PairArguments of () as _spec {
            low: u32,
            high: i64,
        }
    }

    crate::parameters! {
        /// Of every kind.
        struct Everything / EverythingArguments of Spec as spec {
            pair: PairArguments = (),
            rows: Divide,
            factors: Vec<f32> = vec![(); spec.factors],
            strides: [u64; 2],
            scale: AtExecution<f64>,
            x: Read = 16,
            weights: Option<ReadWrite> = spec.weighted.then_some(4),
            y: Write = 8,
        }
    }

    fn kernel(spec: &Spec) -> KernelBody {
        let header = Header { name: "everything".into(), target: Target::Sm80, threads: 32, min_ctas: 1, cluster: 1 };
        build(header, |k| {
            Everything::declare(k, spec);
        })
    }

    fn given(factors: usize, weights: Option<Address>) -> EverythingArguments {
        EverythingArguments {
            pair: PairArguments { low: 1, high: -2 },
            rows: 3,
            factors: vec![0.5; factors],
            strides: [4, 5],
            scale: HostNumber::Bound(0),
            x: Address { offset_bytes: 32, ..Address::buffer(0) },
            weights,
            y: Address::buffer(2),
        }
    }

    fn launch(args: Arguments) -> Launch {
        let kernel = KernelRef::new("everything", || unreachable!("it is not built here"));
        Launch { kernel, grid: [1; 3], residency: Residency::Any, overlap: false, args }
    }

    #[test]
    fn both_sides_agree_in_number_order_and_type() {
        for (weighted, factors) in [(false, 0), (true, 0), (true, 3)] {
            let spec = Spec { weighted, factors };
            let args = given(factors, weighted.then(|| Address::buffer(1))).bound(&spec);
            let body = kernel(&spec);
            let declared: Vec<_> = body.params.iter().map(|param| param.name).collect();
            assert_eq!(args.names().collect::<Vec<_>>(), declared);
            assert_eq!(launch(args).check(&body), Ok(()));
        }
    }

    #[test]
    fn what_the_spec_decides_is_refused_by_name() {
        let refused = |spec: &Spec, args: EverythingArguments| launch(args.bound(spec)).check(&kernel(spec)).expect_err("refused").what;
        let weighted = Spec { weighted: true, factors: 2 };
        assert_eq!(refused(&weighted, given(2, None)), "parameter weights is missing, and this spec has one");
        assert_eq!(refused(&weighted, given(1, Some(Address::buffer(1)))), "1 of parameter factors given, 2 declared");
        let plain = Spec { weighted: false, factors: 2 };
        assert_eq!(refused(&plain, given(2, Some(Address::buffer(1)))), "parameter weights is given, and this spec has none");
    }

    #[test]
    fn arguments_of_another_kernel_are_refused_by_name() {
        let spec = Spec { weighted: true, factors: 1 };
        let mut args = Arguments::new();
        args.bind::<PairArguments>("pair", &(), PairArguments { low: 1, high: 2 });
        args.bind::<Divide>("columns", &(), 3);
        for _ in 0..7 {
            args.bind::<u32>("rest", &(), 0);
        }
        let why = launch(args).check(&kernel(&spec)).expect_err("refused").what;
        assert_eq!(why, "argument 2 is given for columns, the kernel's parameter is rows");
    }

    #[test]
    fn the_alignment_of_a_slot_is_the_strictest_of_its_pointers() {
        let spec = Spec { weighted: true, factors: 0 };
        let mut program = Program { buffer_alignment_bytes: vec![1, 2, 1, 1], ..Program::default() };
        program.launch(launch(given(0, Some(Address::buffer(2))).bound(&spec)));
        assert_eq!(program.buffer_alignment_bytes, [16, 2, 8, 1], "what was asked for before stays; y is stricter than the weights");
        // A pointer into the buffer that no aligned start brings to 16 bytes.
        let mut inside = given(0, Some(Address::buffer(1)));
        inside.x.offset_bytes = 8;
        let why = launch(inside.bound(&spec)).check(&kernel(&spec)).expect_err("refused").what;
        assert!(why.contains("parameter x"), "{why}");
    }
}
