//! Rows that bulk copies bring to shared memory as a whole, and that are worked on there: nothing of a row waits in registers, so that a few warps take a long one, of any length
//! up to what there is room for. Each team has places for rows of its own, and one of its threads asks for the next row when all of them have left one; teams wait for no other.
//! A team of one warp meets at no barrier.

use verdigris_kir::face::{Kernel, MbarrierArray, Val, Var};
use verdigris_kir::tile::ring::publish_barriers;
use verdigris_tensor::DType;

use super::NARROW_CTA;
use super::kernel::Share;
use crate::fuse::strided::{Line, Packed};

/// Bytes of an access: whole ones are what bulk copies take.
pub(super) const ACCESS_BYTES: u32 = 16;
/// Accesses that a thread goes through together.
pub(super) const UNROLL: u32 = 4;
/// Registers that a thread has enough of.
pub(super) const REGISTERS: u32 = 80;
/// Accesses of a row to a thread: as many as are worth two meetings, and no more than a thread goes through in two microseconds.
const MOST_HELD: u64 = 24;
/// Those of rows of 4,096, 8,192 and 16,384 elements of 16 bits, where a CTA takes a row.
pub(super) const USUAL_HELD: u32 = 8;

/// Threads of a CTA of such teams. A team of many warps is alone, so that its barriers are no other's.
pub(super) fn threads_of(team: u32) -> u32 {
    if team == 32 { NARROW_CTA } else { team }
}

/// Threads that take a row of so many accesses, the fewest first.
pub(super) fn teams(accesses: u64) -> impl Iterator<Item = u32> {
    let fits = move |team: &u32| accesses <= MOST_HELD * u64::from(*team) && 4 * u64::from(*team) <= accesses;
    [32, 64, 128, 256].into_iter().filter(fits).take(2)
}

/// The places of a team.
#[derive(Clone, Debug)]
pub(super) struct Bulk<'k> {
    k: Kernel<'k>,
    team: u32,
    places: u32,
    vector: u32,
    /// Bytes of a place, and where the row of each operand begins in it.
    place_bytes: u32,
    operands: Vec<(DType, u32)>,
    full: MbarrierArray<'k>,
    first_barrier: Val<'k, u32>,
    address: Val<'k, u32>,
    /// Whether this is the thread that asks for rows.
    leads: Val<'k, bool>,
    /// The place that is next, and the parity of its turn.
    place: Var<'k, u32>,
    parity: Var<'k, u32>,
}

impl<'k> Bulk<'k> {
    /// Places for `places` rows to each team, of `held` accesses to a thread of each operand.
    #[track_caller]
    pub(super) fn new(share: &Share<'k>, places: u32, held: u32, team: Val<'k, u32>, operands: &[DType]) -> Bulk<'k> {
        let k = share.k;
        let row_bytes = share.team * held * ACCESS_BYTES;
        let place_bytes = operands.len() as u32 * row_bytes;
        let teams = k.threads() / share.team;
        let full = k.mbarrier_array("rows", teams * places);
        full.arrivals().set(1);
        let address = k.shared("rows", teams * places * place_bytes, 128).address() + team * (places * place_bytes);
        let operands = (0..).zip(operands).map(|(number, &dtype): (u32, &DType)| (dtype, number * row_bytes)).collect();
        Bulk {
            k,
            team: share.team,
            places,
            vector: share.vector,
            place_bytes,
            operands,
            full,
            first_barrier: team * places,
            address,
            leads: share.member.eq(0),
            place: k.var(0u32),
            parity: k.var(0u32),
        }
    }

    /// Where the row is that is worked on.
    fn here(&self) -> Val<'k, u32> {
        self.address + self.place * self.place_bytes
    }

    /// Asks for a row to the place that is next.
    #[track_caller]
    pub(super) fn start(&self, lines: &[Line<'k>], elements: Val<'k, u32>) {
        self.k.when(self.leads, || {
            let barrier = self.full.at(self.first_barrier + self.place);
            let bytes: Vec<Val<'k, u32>> = self.operands.iter().map(|(dtype, _)| elements * dtype.bytes() as u32).collect();
            barrier.arrive_expect_tx(bytes.iter().skip(1).fold(bytes[0], |sum, &bytes| sum + bytes));
            for ((line, bytes), (_, begin)) in lines.iter().zip(bytes).zip(&self.operands) {
                line.start_bulk_copy(self.here() + *begin, bytes, barrier);
            }
        });
    }

    /// Asks for the first rows, by `start` with the number of each.
    #[track_caller]
    pub(super) fn begin(&self, start: impl Fn(u32)) {
        self.k.when(self.k.thread().eq(0), || self.full.init());
        publish_barriers(self.k);
        for number in 0..self.places {
            start(number);
            self.go_on();
        }
        self.parity.set(0u32);
    }

    /// Waits for the row that is next.
    #[track_caller]
    pub(super) fn wait(&self) {
        self.full.at(self.first_barrier + self.place).wait(self.parity);
    }

    /// A vector of the row that is worked on.
    #[track_caller]
    pub(super) fn load(&self, operand: usize, number: Val<'k, u32>) -> Packed<'k> {
        let (dtype, begin) = self.operands[operand];
        Packed::load_copied(self.k, dtype, self.vector, self.here() + number * ACCESS_BYTES, i64::from(begin))
    }

    /// All threads of the team have left the row.
    #[track_caller]
    pub(super) fn leave(&self) {
        if self.team == 32 { self.k.warp_sync() } else { self.k.bar_sync() }
    }

    /// Goes on to the next place.
    #[track_caller]
    pub(super) fn go_on(&self) {
        let next = self.place + 1;
        let wraps = next.eq(self.places);
        self.place.set(self.k.select(wraps, 0u32, next));
        self.parity.set(self.k.select(wraps, self.parity ^ 1, self.parity));
    }
}
