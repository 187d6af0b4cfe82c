//! The part of `verify` that sees to the kinds of data: what each run took, and what no run took though it matters.
//!
//! Runs draw their kinds ([`kinds`](verdigris_reference::kinds)), so a day's seed may leave a class of kernels without the one that shows its mistakes. Behind
//! all others, the smallest case of each such class runs on each kind that is missing.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Engine;
use verdigris_reference::cases::Case;
use verdigris_reference::data::Distribution;

use crate::classes::{Run, class, representatives};
use crate::verify::Work;
use crate::verify_graphs::Job;
use verdigris_cli::say;
use verdigris_cli::table::{self, Align};

/// SMs of the devices on which the smallest case of a class is looked for.
pub(crate) const DEVICES_SMS: [u32; 8] = [4, 2, 3, 5, 6, 8, 12, 16];

/// What runs took: elements of outputs by kind, and kinds by class of kernels.
#[derive(Default)]
pub(crate) struct Taken {
    elements: BTreeMap<Distribution, (u64, u64)>,
    classes: BTreeSet<(String, Distribution)>,
}

impl Taken {
    /// Counts elements of a kind, and those of them about which the rounding model says nothing.
    pub(crate) fn count(&mut self, kind: Distribution, (elements, unjudged): (u64, u64)) {
        let sum = self.elements.entry(kind).or_default();
        *sum = (sum.0 + elements, sum.1 + unjudged);
    }

    /// Notes that a kernel ran on a kind.
    pub(crate) fn note(&mut self, kernel: &str, kind: Distribution) {
        self.classes.insert((class(kernel), kind));
    }

    /// The smallest cases of the classes that no run led to on a kind that matters to them.
    ///
    /// # Errors
    /// A case file that cannot be read.
    pub(crate) fn missing(&self, engines: &[&'static dyn Engine]) -> Result<(Vec<Case>, Vec<Work>, Vec<Job<'static>>)> {
        let devices: Vec<Arch> = DEVICES_SMS.map(Arch::virtual_device).into();
        let (mut cases, mut works, mut jobs) = (Vec::new(), Vec::new(), Vec::new());
        for one in representatives(engines, &devices, &[])?.0 {
            for kind in one.kinds_that_matter() {
                if one.classes.iter().all(|class| self.classes.contains(&(class.clone(), kind))) {
                    continue;
                }
                match &one.run {
                    Run::Product(product) => {
                        let (case, knobs) = (cases.len(), product.knobs.clone());
                        cases.push(product.case.clone());
                        works.push(Work { case, engine: product.engine, knobs, seed: 0, sms: product.sms, kind });
                    }
                    Run::Graph(job, _) => jobs.push(Job { kinds: [kind; 2], ..job.clone() }),
                }
            }
        }
        Ok((cases, works, jobs))
    }

    /// Prints how many elements of each kind were judged.
    pub(crate) fn print(&self) {
        let row = |(kind, (elements, unjudged)): (&Distribution, &(u64, u64))| {
            let share = 100.0 * *unjudged as f64 / (*elements).max(1) as f64;
            vec![kind.to_string(), elements.to_string(), format!("{share:.2} %")]
        };
        say!();
        let columns = [("data", Align::Left), ("elements", Align::Right), ("not judged", Align::Right)];
        table::print(&columns, &self.elements.iter().map(row).collect::<Vec<_>>());
    }
}
