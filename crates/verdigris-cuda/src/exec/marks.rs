//! What other streams have of a program's own memory: its constants are freed in the order of one stream, and may be read by all.

use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

use crate::error::Error;
use crate::memory::DeviceBuffer;
use crate::stream::{CaptureStatus, Event, Stream};

/// So many streams have a mark each; of one more, the oldest mark is handed to the stream that frees.
const MOST_MARKS: usize = 16;

/// `CU_STREAM_PER_THREAD`: one name for another stream in each thread.
const PER_THREAD: usize = 2;

/// The constants of a program, freed behind every execution that reads them, on whichever stream it is.
///
/// Each stream but the one that frees has an event, which is recorded anew behind each execution. Work that a stream only records for a graph leaves no
/// mark: an event recorded there would be part of the graph, and what a graph replays has to be kept by whoever replays it.
#[derive(Debug)]
pub(super) struct Constants {
    /// Dropped by hand: not at all where nobody knows when it has been read.
    buffer: ManuallyDrop<DeviceBuffer>,
    marks: Mutex<Marks>,
}

#[derive(Debug, Default)]
struct Marks {
    list: Vec<Mark>,
    /// An execution could not be marked: nobody knows when it is over.
    is_lost: bool,
}

#[derive(Debug)]
struct Mark {
    /// Kept, so that no other stream gets its name.
    stream: Stream,
    /// Which of the streams of that name.
    thread: Option<ThreadId>,
    event: Event,
}

impl Constants {
    pub(super) fn new(buffer: DeviceBuffer) -> Constants {
        Constants { buffer: ManuallyDrop::new(buffer), marks: Mutex::default() }
    }

    pub(super) fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Has `submit` give work to the stream that reads the constants, and marks its end.
    #[inline]
    pub(super) fn read_by(&self, stream: &Stream, submit: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let home = self.buffer.stream();
        if self.buffer.len_bytes() == 0 || (stream.raw() == home.raw() && !is_per_thread(stream)) {
            return submit();
        }
        self.marked(home, stream, submit)
    }

    fn marked(&self, home: &Stream, stream: &Stream, submit: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if stream.capture_status()? != CaptureStatus::None {
            return submit();
        }
        let thread = is_per_thread(stream).then(|| thread::current().id());
        self.room_for(home, stream, thread)?;
        let submitted = submit();
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        // Also behind an error: what came before it is on the stream.
        let recorded = match marks.list.iter().find(|mark| mark.is_of(stream, thread)) {
            Some(mark) => mark.event.record(stream),
            // Sixteen others came in between.
            None => Event::ordering(stream.context()).and_then(|event| {
                event.record(stream)?;
                marks.list.push(Mark { stream: stream.clone(), thread, event });
                Ok(())
            }),
        };
        marks.is_lost |= recorded.is_err();
        submitted.and(recorded)
    }

    /// Makes the stream's event, so that want of it is known before anything is submitted.
    fn room_for(&self, home: &Stream, stream: &Stream, thread: Option<ThreadId>) -> Result<(), Error> {
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if marks.list.iter().any(|mark| mark.is_of(stream, thread)) {
            return Ok(());
        }
        // A stream that captures cannot wait for what lies outside of its capture.
        while marks.list.len() >= MOST_MARKS && home.capture_status()? == CaptureStatus::None {
            home.wait(&marks.list[0].event)?;
            marks.list.remove(0);
        }
        let event = Event::ordering(stream.context())?;
        marks.list.push(Mark { stream: stream.clone(), thread, event });
        Ok(())
    }
}

impl Mark {
    fn is_of(&self, stream: &Stream, thread: Option<ThreadId>) -> bool {
        self.stream.raw() == stream.raw() && self.thread == thread
    }
}

fn is_per_thread(stream: &Stream) -> bool {
    stream.raw().addr() == PER_THREAD
}

impl Drop for Constants {
    fn drop(&mut self) {
        let marks = self.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let home = self.buffer.stream();
        // Neither a wait for other streams nor a free of such memory can be recorded in a graph, and either would spoil it.
        let may_free = || !marks.is_lost && matches!(home.capture_status(), Ok(CaptureStatus::None));
        let is_ordered = || marks.list.iter().all(|mark| home.wait(&mark.event).is_ok());
        // Memory that nobody frees is better than memory that is freed while it is read.
        if self.buffer.len_bytes() == 0 || (may_free() && is_ordered()) {
            // SAFETY: the object is ending, and nobody uses its field behind this.
            unsafe { ManuallyDrop::drop(&mut self.buffer) };
        }
    }
}
