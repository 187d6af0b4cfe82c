//! The stages by teams of CTAs that keep what they read.
//!
//! The CTAs of a team have the same block of channels, each a part of its points. They sum, wait for each other, join, wait once more and write the result;
//! then they go on to the team's next block. So what is read a second time was read a moment before, and no more than the teams' blocks at a time has to
//! lie somewhere: the first *rows* of a part (a point for each line of threads) in shared memory, whose every word one thread copies in and reads, the
//! others in L2. The rows that were read last are the first ones of the result, which is stored so that it is the first to leave L2.
//!
//! A row that has been turned into its result makes room for the same row of the team's next block, whose copies are on their way while the team still
//! writes and waits.

use verdigris_kir::face::{Val, Var};
use verdigris_kir::inst::Cache;

use super::kernel::{Elements, Run, Tile};
use super::operands::Whole;
use super::spec::{THREADS, WARPS};
use crate::fuse::compute::Compute;

/// What a CTA keeps of its part.
pub(super) struct Room<'k> {
    /// The thread's place in it.
    address: Val<'k, u32>,
    /// Rows of the part that are kept: whole turns.
    rows: Val<'k, u32>,
    /// Whether nobody has sent for them yet.
    is_first: Val<'k, bool>,
    /// Whether the team has another block behind this one, and how many channels further on the thread's are.
    goes_on: Val<'k, bool>,
    ahead: Val<'k, u32>,
}

/// A function of a turn: points, and what each operand has there.
pub(super) type EachTurn<'f, 'k> = &'f dyn Fn(&[Vec<Val<'k, u32>>], &[Vec<Elements<'k>>]);

/// Words of a turn that are on their way, by operand and row.
struct Coming<'k>(Vec<Vec<Vec<Var<'k, u32>>>>);

impl<'k> Run<'_, 'k> {
    /// All blocks of the CTA's team.
    pub(super) fn rounds<T: Compute>(&self) {
        let (k, spec, values) = (self.k, self.spec, &self.values);
        let (Some([teams, blocks]), Some(arrivals)) = (values.teams, values.arrivals) else { return };
        let (team, part) = values.blocks.split(k.cta());
        let arrivals = arrivals.of_team(team, values.parts);
        let row_bytes: u32 = spec.kept_bytes().iter().sum();
        let room = k.shared("room", spec.room_rows() * row_bytes * THREADS, 16).address();
        let times = k.var(0u32);
        let wait = || {
            times.set(times.get() + 1);
            self.wait_at(arrivals, times.get());
        };
        k.range_step(team, blocks, teams, |block| {
            let mut tile = self.tile_of(block, part);
            let goes_on = (block + teams).lt(blocks);
            let next = self.tile_of((block + teams).min(blocks - 1), part);
            let whole_rows = (tile.end - tile.begin) >> spec.lines().ilog2();
            tile.room = Some(Room {
                address: room,
                rows: whole_rows.min(spec.room_rows()) & !(spec.rows_of_turn() - 1),
                is_first: block.eq(team),
                goes_on,
                ahead: next.channel - tile.channel,
            });
            self.sums::<T>(&tile);
            wait();
            let first = block * spec.width();
            self.join::<T>(first + part * WARPS, (first + spec.width()).min(values.channels), values.parts);
            wait();
            self.apply::<T>(&tile);
        });
    }

    /// Where the thread's vector of an operand lies in a row that is kept.
    fn place(&self, room: &Room<'k>, operand: usize, row: Val<'k, u32>) -> Val<'k, u32> {
        let bytes = self.spec.kept_bytes();
        let (row_bytes, before): (u32, u32) = (bytes.iter().sum(), bytes[..operand].iter().sum());
        room.address + row * (row_bytes * THREADS) + before * THREADS + self.k.thread() * bytes[operand]
    }

    /// Sends for a row that is kept, of operands from a channel on.
    fn send_for(&self, room: &Room<'k>, row: Val<'k, u32>, index: &[Val<'k, u32>], from: &[Whole<'k>]) {
        for (operand, from) in from.iter().enumerate() {
            let bytes = from.bytes();
            self.k.cp_async(self.place(room, operand, row), 0, from.address(index), 0, bytes as u8, bytes);
        }
    }

    /// As [`Run::walk`], with what is kept in shared memory: the operands that come first, as many as the sums read.
    pub(super) fn walk_kept(&self, tile: &Tile<'k>, room: &Room<'k>, again: bool, from: &[&Whole<'k>], f: EachTurn<'_, 'k>) {
        let (k, spec) = (self.k, self.spec);
        let (lines, turn) = (spec.lines(), spec.rows_of_turn());
        let kept = spec.kept_bytes().len();
        let index = |row: Val<'k, u32>| self.index(tile.begin + tile.line + row * lines);
        if !again {
            let own: Vec<Whole<'k>> = from.iter().copied().cloned().collect();
            k.when(room.is_first, || k.range_unrolled(room.rows, turn, |row| self.send_for(room, row, &index(row), &own)));
            k.cp_async_commit();
        }
        self.stream(tile, room, again, from, f);
        if !again {
            k.cp_async_wait(0);
        }
        let next: Vec<Whole<'k>> = from[..kept].iter().map(|from| from.at_channel(room.ahead)).collect();
        k.range_step(0, room.rows, turn, |first| {
            let rows: Vec<_> = (0..turn).map(|i| first + i).collect();
            let points: Vec<_> = rows.iter().map(|&row| index(row)).collect();
            let read = |operand: usize, row: usize| match from[operand].bytes() {
                _ if operand >= kept => from[operand].words(&points[row], Cache::Streaming),
                4 => vec![k.ld_shared::<u32>(self.place(room, operand, rows[row]), 0)],
                bytes => k.ld_shared_vector::<u32>(self.place(room, operand, rows[row]), 0, (bytes / 4) as u8),
            };
            let loaded: Vec<Vec<Elements<'k>>> =
                (0..from.len()).map(|operand| (0..rows.len()).map(|row| from[operand].elements(&read(operand, row))).collect()).collect();
            if again {
                k.when(room.goes_on, || rows.iter().zip(&points).for_each(|(&row, index)| self.send_for(room, row, index, &next)));
            }
            f(&points, &loaded);
        });
    }

    /// Runs `f` for the rows that are not kept, two turns of which are on their way beside the one that is there; again, the last come first.
    fn stream(&self, tile: &Tile<'k>, room: &Room<'k>, again: bool, from: &[&Whole<'k>], f: EachTurn<'_, 'k>) {
        let (k, spec) = (self.k, self.spec);
        let (lines, turn) = (spec.lines(), spec.rows_of_turn());
        let span = lines * turn;
        let first = tile.begin + room.rows * lines;
        let turns = (tile.end - first) >> span.ilog2();
        let cache = if again { Cache::Streaming } else { Cache::Default };
        let points = |number: Val<'k, u32>| -> Vec<_> {
            let number = if again { turns - 1 - number } else { number };
            (0..turn).map(|i| self.index(first + tile.line + number * span + i * lines)).collect()
        };
        let unset = |from: &&Whole<'k>| (0..turn).map(|_| (0..from.bytes() / 4).map(|_| k.var(0u32)).collect()).collect();
        let coming = || Coming(from.iter().map(unset).collect());
        let send_for = |to: &Coming<'k>, number: Val<'k, u32>| {
            k.when(number.lt(turns), || {
                let points = points(number);
                for (to, from) in to.0.iter().zip(from) {
                    for (to, index) in to.iter().zip(&points) {
                        to.iter().zip(from.words(index, cache)).for_each(|(to, word)| to.set(word));
                    }
                }
            });
        };
        let take = |coming: &Coming<'k>, number: Val<'k, u32>| {
            let loaded: Vec<Vec<Elements<'k>>> = (coming.0.iter().zip(from))
                .map(|(rows, from)| {
                    let elements = |words: &Vec<Var<'k, u32>>| from.elements(&words.iter().map(|word| word.get()).collect::<Vec<_>>());
                    rows.iter().map(elements).collect()
                })
                .collect();
            f(&points(number), &loaded);
        };
        let rest = || {
            k.range_step(first + (turns << span.ilog2()) + tile.line, tile.end, lines, |point| {
                let index = self.index(point);
                let loaded: Vec<_> = from.iter().map(|from| vec![from.elements(&from.words(&index, cache))]).collect();
                f(&[index], &loaded);
            });
        };
        if again {
            rest();
        }
        let two = [coming(), coming()];
        send_for(&two[0], k.constant(0));
        send_for(&two[1], k.constant(1));
        k.range_step(0, turns, 2, |number| {
            take(&two[0], number);
            send_for(&two[0], number + 2);
            k.when((number + 1).lt(turns), || take(&two[1], number + 1));
            send_for(&two[1], number + 3);
        });
        if !again {
            rest();
        }
    }
}
