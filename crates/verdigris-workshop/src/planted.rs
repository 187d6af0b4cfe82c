//! `check planted`: a small kernel with one fault, for the tool that must find it.
//!
//! A sanitizer that reports nothing proves nothing unless it finds what is there. The verifier cannot know of these faults (they come of what
//! is loaded, or of the launch); the interpreter finds each of them, which the tests show.

use anyhow::Result;
use clap::ValueEnum;
use verdigris::{Config, Handle};
use verdigris_cuda::{Bindings, DeviceBuffer, DeviceSlice};
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Program, Residency, Step};

use verdigris_cli::{Verdict, device};

const THREADS: u32 = 64;
/// Words of the buffer that is read and of the one that is written.
const WORDS: u32 = THREADS;

/// A tool of `compute-sanitizer`, which names the fault that is planted for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Tool {
    /// Accesses outside of what is allocated: a store behind the end of a buffer.
    Memcheck,
    /// Memory that is read before it is written: a buffer that nothing has filled.
    Initcheck,
    /// Barriers that are used wrongly: one that only some lanes of a warp reach.
    Synccheck,
    /// Races in shared memory: a value of another warp's, read without a barrier.
    Racecheck,
}

impl Tool {
    /// The name by which `compute-sanitizer` knows it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Tool::Memcheck => "memcheck",
            Tool::Initcheck => "initcheck",
            Tool::Synccheck => "synccheck",
            Tool::Racecheck => "racecheck",
        }
    }

    /// Whether the input is written before the launch.
    fn fills_input(self) -> bool {
        self != Tool::Initcheck
    }
}

/// Options of `check planted`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The tool whose fault is to happen.
    tool: Tool,
}

/// Carries out `check planted`: runs the kernel, and says nothing of what comes out. To be run under the tool.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let config = Config::from_environment()?;
    let Some(handle) = device::open("check planted", &config, false)? else {
        return Ok(Verdict::Good);
    };
    execute(&handle, arguments.tool)?;
    Ok(Verdict::Good)
}

fn execute(handle: &Handle, tool: Tool) -> Result<()> {
    let (stream, pool) = (handle.stream(), handle.pool());
    let loaded = handle.loader().load(&program(tool), stream)?;
    // Every word is its own index, so that the kernel knows its threads by what it loads.
    let words: Vec<u8> = (0..WORDS).flat_map(u32::to_le_bytes).collect();
    let input = if tool.fills_input() { pool.alloc_from(stream, &words)? } else { pool.alloc(stream, words.len() as u64)? };
    let output = pool.alloc(stream, words.len() as u64)?;
    let workspace = pool.alloc(stream, loaded.workspace_bytes().max(256))?;
    let slices: Vec<DeviceSlice<'_>> = [&input, &output].map(DeviceBuffer::slice).into();
    loaded.execute(stream, &Bindings { buffers: &slices, workspace: workspace.slice(), host_scalars: &[], lists: &[] })?;
    stream.synchronize()?;
    Ok(())
}

/// The kernel with the tool's fault, as reports name it.
pub(crate) fn kernel_name(tool: Tool) -> String {
    format!("planted_{}", tool.name())
}

fn program(tool: Tool) -> Program {
    let launch = Launch {
        kernel: KernelRef::new(kernel_name(tool), move || kernel(tool)),
        grid: [1, 1, 1],
        residency: Residency::Any,
        overlap: false,
        // Far enough behind the end to leave what an allocator may have rounded up to.
        args: vec![Arg::Pointer(Address::buffer(0)), Arg::Pointer(Address::buffer(1)), Arg::Scalar(Ty::U32, 1 << 22)].into(),
    };
    Program { steps: vec![Step::Launch(launch)], buffer_alignment_bytes: vec![4, 4], ..Program::default() }
}

/// `y[i] = x[(i + 32) mod 64] + x[i]`, by way of shared memory, with the tool's fault.
fn kernel(tool: Tool) -> KernelBody {
    let header = Header { name: kernel_name(tool), target: Target::Sm80, threads: THREADS, ..Header::default() };
    build(header, |k| turn_round(k, tool))
}

fn turn_round(k: Kernel<'_>, tool: Tool) {
    let (x, y, beyond) = (k.input("x", 4), k.output("y", 4), k.scalar::<u32>("beyond"));
    let tile = k.shared("tile", WORDS * 4, 16);
    let mine = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
    k.st_shared(tile.address() + k.thread() * 4u32, 0, mine);
    match tool {
        // Nobody waits for the other warp.
        Tool::Racecheck => {}
        // Of the second warp the last 24 lanes do not come.
        Tool::Synccheck => k.when(mine.lt(40u32), || k.bar_sync()),
        Tool::Memcheck | Tool::Initcheck => k.bar_sync(),
    }
    // By what was loaded: of a place that it knows, the verifier would speak.
    let other = (mine + 32u32) & (WORDS - 1);
    let theirs = k.ld_shared::<u32>(tile.address() + other * 4u32, 0);
    let strays = tool == Tool::Memcheck;
    let to = if strays { k.thread() + beyond } else { k.thread() };
    k.st_global(y.at(to, 4), 0, mine + theirs);
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_kir::interp::{FindingKind, Kernels, Memory, Options, run};
    use verdigris_kir::verify::verify;

    /// What the interpreter finds under any of twenty schedules.
    fn found(tool: Tool) -> Vec<FindingKind> {
        let words: Vec<u8> = (0..WORDS).flat_map(u32::to_le_bytes).collect();
        let of_schedule = |seed| {
            let mut memory = Memory::new();
            if tool.fills_input() {
                memory.add(&words);
            } else {
                memory.add_unwritten(words.len() as u64);
            }
            memory.add_unwritten(words.len() as u64);
            run(&program(tool), &Kernels::new(), &mut memory, &Options::schedule(seed))
        };
        (0..20).filter_map(|seed| of_schedule(seed).err()).flat_map(|findings| findings.findings.into_iter().map(|one| one.kind)).collect()
    }

    #[test]
    fn the_verifier_passes_each_fault_and_the_interpreter_finds_it() {
        for (tool, kind) in [
            (Tool::Memcheck, FindingKind::OutOfBounds),
            (Tool::Initcheck, FindingKind::UnwrittenMemory),
            (Tool::Synccheck, FindingKind::Divergence),
            (Tool::Racecheck, FindingKind::Race),
        ] {
            verify(kernel(tool)).expect("no static fault");
            let kinds = found(tool);
            assert!(kinds.contains(&kind), "{tool:?}: {kinds:?}");
        }
    }
}
