//! What a launch has to know of a kernel without building it.
//!
//! A kernel's body is built only to be compiled; a program launched from the cache has its facts instead, kept beside
//! its code.

use verdigris_kir::ir::{KernelBody, MapDecl, ParamKind};

/// What a parameter of a compiled kernel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterFact {
    /// A number by value, of that many bytes.
    Scalar {
        /// Its size in the parameter block.
        bytes: u32,
    },
    /// A device address.
    Pointer {
        /// The alignment that the kernel relies on.
        alignment_bytes: u32,
    },
    /// The 16 bytes of a division by a run-time number.
    Divisor,
    /// The 128 bytes of a tensor map.
    TensorMap {
        /// A hash of the [`MapDecl`] that the kernel was built for.
        decl_hash: u32,
    },
}

/// A parameter and its place in the parameter block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Where it begins.
    pub offset_bytes: u32,
    /// What it is.
    pub fact: ParameterFact,
}

/// Launch configuration and signature of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFacts {
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs of a cluster along x; 1 without clusters.
    pub cluster: u32,
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// The parameters in order.
    pub parameters: Vec<Parameter>,
    /// Size of the parameter block.
    pub parameter_bytes: u32,
}

impl ParameterFact {
    /// Its size in the parameter block.
    pub fn bytes(&self) -> u32 {
        match self {
            Self::Scalar { bytes } => *bytes,
            Self::Pointer { .. } => 8,
            Self::Divisor => 16,
            Self::TensorMap { .. } => 128,
        }
    }
}

/// A hash of a map's declaration that is the same in every process: equal declarations print alike.
pub(crate) fn hash_of(decl: &MapDecl) -> u32 {
    let hash = blake3::hash(format!("{decl:?}").as_bytes());
    let [a, b, c, d, ..] = *hash.as_bytes();
    u32::from_le_bytes([a, b, c, d])
}

impl KernelFacts {
    /// The facts of a kernel.
    pub fn of(body: &KernelBody) -> Self {
        let fact = |kind: &ParamKind| match kind {
            ParamKind::Scalar(_) => ParameterFact::Scalar { bytes: kind.bytes() },
            ParamKind::Pointer { alignment_bytes, .. } => ParameterFact::Pointer { alignment_bytes: *alignment_bytes },
            ParamKind::Divisor => ParameterFact::Divisor,
            ParamKind::TensorMap(decl) => ParameterFact::TensorMap { decl_hash: hash_of(decl) },
        };
        let (offsets, parameter_bytes) = body.param_offsets();
        let places = body.params.iter().zip(offsets);
        Self {
            threads: body.threads,
            cluster: body.cluster,
            shared_bytes: body.shared_bytes,
            parameters: places.map(|(param, offset_bytes)| Parameter { offset_bytes, fact: fact(&param.kind) }).collect(),
            parameter_bytes,
        }
    }

    /// The facts as bytes, to stand before what [`KernelFacts::from_bytes`] returns beside them.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let count = self.parameters.len() as u32;
        let parameters = self.parameters.iter().flat_map(|parameter| {
            let (kind, number) = match parameter.fact {
                ParameterFact::Scalar { bytes } => (0, bytes),
                ParameterFact::Pointer { alignment_bytes } => (1, alignment_bytes),
                ParameterFact::Divisor => (2, 0),
                ParameterFact::TensorMap { decl_hash } => (3, decl_hash),
            };
            [parameter.offset_bytes, kind, number]
        });
        let head = [self.threads, self.cluster, self.shared_bytes, self.parameter_bytes, count];
        let mut bytes: Vec<u8> = head.into_iter().chain(parameters).flat_map(u32::to_le_bytes).collect();
        // What is read in words stays aligned behind it.
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// The facts at the head of the bytes, and what follows them; `None` where there are none.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut rest = bytes;
        let mut next = || -> Option<u32> {
            let (word, tail) = rest.split_first_chunk::<4>()?;
            rest = tail;
            Some(u32::from_le_bytes(*word))
        };
        let (threads, cluster, shared_bytes, parameter_bytes, count) = (next()?, next()?, next()?, next()?, next()?);
        let mut parameters = Vec::new();
        for _ in 0..count {
            let offset_bytes = next()?;
            let fact = match (next()?, next()?) {
                (0, bytes) => ParameterFact::Scalar { bytes },
                (1, alignment_bytes) => ParameterFact::Pointer { alignment_bytes },
                (2, _) => ParameterFact::Divisor,
                (3, decl_hash) => ParameterFact::TensorMap { decl_hash },
                _ => return None,
            };
            parameters.push(Parameter { offset_bytes, fact });
        }
        let read = bytes.len() - rest.len();
        let rest = bytes.get(read.next_multiple_of(8)..)?;
        Some((Self { threads, cluster, shared_bytes, parameters, parameter_bytes }, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_survive_the_disk() {
        let at = |offset_bytes, fact| Parameter { offset_bytes, fact };
        let facts = KernelFacts {
            threads: 384,
            cluster: 2,
            shared_bytes: 200_000,
            parameters: vec![
                at(0, ParameterFact::TensorMap { decl_hash: 77 }),
                at(128, ParameterFact::Pointer { alignment_bytes: 16 }),
                at(136, ParameterFact::Scalar { bytes: 4 }),
                at(140, ParameterFact::Divisor),
            ],
            parameter_bytes: 156,
        };
        let bytes = [facts.to_bytes(), b"cubin".to_vec()].concat();
        assert_eq!(KernelFacts::from_bytes(&bytes), Some((facts.clone(), &b"cubin"[..])));
        assert!(facts.to_bytes().len().is_multiple_of(8));
        for length in 0..facts.to_bytes().len() {
            assert_eq!(KernelFacts::from_bytes(&bytes[..length]), None, "cut at {length}");
        }
        let mut unknown = bytes;
        unknown[24] = 9;
        assert_eq!(KernelFacts::from_bytes(&unknown), None);
    }
}
