//! The plans of calls: a map with a bound.
//!
//! When there are more plans than [`LIMIT`], those that were used longest ago go, an eighth of them at once. "When" is counted in plans made: a plan is stamped with
//! how many there had been at its last use, so that a use costs two loads, and all that a loop uses between two new shapes is equally recent. A call that runs holds
//! its plan, whatever becomes of it here.
//!
//! A plan on a GPU whose kernels read constants of its own stays: a graph that was captured, or work that is submitted and not done, may read them still, and nobody
//! says when it no longer does. Kernels are the handle's and are no part of a plan.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::Entry;
use super::key::{Key, WordHasher};

/// The most plans of calls that are kept. A network that trains has some hundred.
pub(super) const LIMIT: usize = 4096;

type Plans = HashMap<Box<[u64]>, Arc<Entry>, WordHasher>;

/// Every plan that is kept, by what its call was.
static PLANS: RwLock<Option<Plans>> = RwLock::new(None);

/// How many plans have been made.
static MADE: AtomicU64 = AtomicU64::new(0);

/// When a plan was used last, in plans made until then.
#[derive(Default)]
pub(super) struct Stamp(AtomicU64);

impl Stamp {
    #[inline]
    pub(super) fn now(&self) {
        let now = MADE.load(Ordering::Relaxed);
        // Threads that use one plan write to it only when there is something new to say.
        if self.0.load(Ordering::Relaxed) != now {
            self.0.store(now, Ordering::Relaxed);
        }
    }
}

/// The plan of a call.
pub(super) fn find(key: &Key) -> Option<Arc<Entry>> {
    let plans = PLANS.read().unwrap_or_else(PoisonError::into_inner);
    plans.as_ref().and_then(|plans| plans.get(key.words()).map(Arc::clone))
}

/// Keeps the plan of a call, and lets go of others where there are too many.
pub(super) fn keep(key: &Key, entry: &Arc<Entry>) {
    MADE.fetch_add(1, Ordering::Relaxed);
    entry.used.now();
    let mut plans = PLANS.write().unwrap_or_else(PoisonError::into_inner);
    let plans = plans.get_or_insert_default();
    plans.insert(key.words().into(), Arc::clone(entry));
    if plans.len() <= LIMIT {
        return;
    }
    let mut stamps: Vec<u64> = plans.values().filter(|entry| may_go(entry)).map(|entry| entry.used.0.load(Ordering::Relaxed)).collect();
    let mut surplus = (LIMIT / 8).min(stamps.len());
    if surplus == 0 {
        return;
    }
    let (_, &mut last, _) = stamps.select_nth_unstable(surplus - 1);
    plans.retain(|_, other| {
        let goes = surplus > 0 && !Arc::ptr_eq(other, entry) && may_go(other) && other.used.0.load(Ordering::Relaxed) <= last;
        surplus -= usize::from(goes);
        !goes
    });
}

/// Whether nothing on a device reads what the plan keeps there.
fn may_go(entry: &Entry) -> bool {
    entry.plan.on_a_gpu().is_none_or(|plan| plan.constant_bytes() == 0)
}

/// How many there are.
pub(super) fn count() -> usize {
    PLANS.read().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, HashMap::len)
}

/// Forgets all.
pub(super) fn clear() {
    let old = PLANS.write().unwrap_or_else(PoisonError::into_inner).take();
    drop(old);
}
