//! The assembler's words, read: resources of each entry, and everything that it complains about.

use serde::{Deserialize, Serialize};

use super::{Assembly, Barriers, BinaryReport, Demands, Slot};

/// Resources of one entry, as the assembler reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EntryReport {
    /// Name of the entry in the PTX.
    pub(crate) entry: String,
    /// Registers a thread, at entry (before any `setmaxnreg`).
    pub(crate) registers: u32,
    /// Statically declared shared memory, in bytes.
    pub(crate) smem_bytes: u32,
    /// Stack frame a thread, in bytes: local memory, for spills or for arrays indexed at run time.
    pub(crate) stack_bytes: u32,
    /// Bytes stored by spills a thread.
    pub(crate) spill_store_bytes: u32,
    /// Bytes loaded back by spills a thread.
    pub(crate) spill_load_bytes: u32,
    /// Barriers of the CTA in use.
    pub(crate) barriers: u32,
    /// What the binary says of the entry, where one came out.
    pub(crate) binary: Option<BinaryReport>,
}

/// A whole run of the assembler.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Parsed {
    pub(super) entries: Vec<EntryReport>,
    /// Lines that are more than information: coded messages, warnings and errors.
    pub(super) complaints: Vec<String>,
}

/// Reads what `ptxas -v` prints.
pub(super) fn parse(words: &str) -> Parsed {
    let mut parsed = Parsed::default();
    // "Function properties" also speak of device functions, whose frames belong to no entry's line.
    let mut properties_of = String::new();
    for line in words.lines() {
        if let Some(name) = quoted_after(line, "Compiling entry function ") {
            parsed.entries.push(EntryReport { entry: name.to_string(), ..EntryReport::default() });
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            properties_of = name.trim().to_string();
        } else if line.contains(" bytes stack frame") {
            if let Some(entry) = parsed.entries.iter_mut().find(|entry| entry.entry == properties_of) {
                entry.stack_bytes = number_before(line, " bytes stack frame");
                entry.spill_store_bytes = number_before(line, " bytes spill stores");
                entry.spill_load_bytes = number_before(line, " bytes spill loads");
            }
        } else if line.contains(": Used ") && line.contains(" registers") {
            if let Some(entry) = parsed.entries.last_mut() {
                entry.registers = number_before(line, " registers");
                entry.smem_bytes = number_before(line, " bytes smem");
                entry.barriers = number_before(line, " barriers");
            }
        } else if is_complaint(line) {
            parsed.complaints.push(line.trim().to_string());
        }
    }
    parsed
}

/// Spills and local memory are judged by their bytes, so the warnings that repeat them are left out.
fn is_complaint(line: &str) -> bool {
    if line.contains("(C75") || line.contains("(C76") {
        return true;
    }
    let serious = ["warning", "error", "fatal"].iter().any(|word| line.contains(&format!("{word} ")) || line.contains(&format!("{word}:")));
    let repeated = line.contains("Registers are spilled to local memory") || line.contains("Local memory used");
    serious && !repeated && !line.contains("ptxas info")
}

/// Why an assembly fails: its complaints, and every entry that uses more than it declares.
pub(super) fn judge(parsed: &Parsed, assembly: &Assembly) -> Vec<String> {
    let mut failures = parsed.complaints.clone();
    let allowed = assembly.allow_spill_bytes;
    for entry in &parsed.entries {
        let name = &entry.entry;
        let spilled = entry.spill_store_bytes.max(entry.spill_load_bytes);
        if spilled > allowed {
            failures.push(format!(
                "`{name}` spills {spilled} bytes ({} stored, {} loaded); {allowed} are declared",
                entry.spill_store_bytes, entry.spill_load_bytes
            ));
        } else if spilled == 0 && entry.stack_bytes > allowed {
            failures.push(format!("`{name}` holds {} bytes in local memory; {allowed} are declared", entry.stack_bytes));
        }
        if let Some(budget) = assembly.max_registers
            && entry.registers > budget
        {
            failures.push(format!("`{name}` uses {} registers; its budget is {budget}", entry.registers));
        }
        if let Some(demands) = &assembly.demands {
            disagreements(entry, demands, &mut failures);
        }
    }
    failures
}

/// The chip hands registers out to threads in steps of this.
const REGISTER_STEP: u32 = 8;

/// What an entry is and its kernel does not say, with the two values and the rule.
fn disagreements(entry: &EntryReport, demands: &Demands, failures: &mut Vec<String>) {
    let name = &entry.entry;
    if let Some(at_entry) = demands.registers_at_entry {
        let given = entry.registers.next_multiple_of(REGISTER_STEP);
        if given != at_entry {
            failures.push(format!(
                "`{name}` enters with {given} registers a thread, but its roles trade {at_entry}: setmaxnreg would wait for what nobody gives back"
            ));
        }
    }
    if entry.smem_bytes != 0 {
        let bytes = entry.smem_bytes;
        failures.push(format!(
            "`{name}` has {bytes} bytes of static shared memory, not 0: a launch gives all of it, and would give too little"
        ));
    }
    let used = entry.barriers;
    match demands.barriers {
        Barriers::Counted(count) if used != count => {
            failures
                .push(format!("`{name}` uses {used} barriers, not {count}: one for each number up to the highest that the kernel names"));
        }
        Barriers::AtLeast(least) if !(least..=CTA_BARRIERS).contains(&used) => {
            failures
                .push(format!("`{name}` uses {used} barriers, not {least} to {CTA_BARRIERS}: numbers that the kernel names in registers"));
        }
        _ => {}
    }
    let Some(binary) = &entry.binary else { return };
    let mut at = binary.base_bytes;
    for (index, (found, &(bytes, alignment_bytes))) in binary.params.iter().zip(&demands.params).enumerate() {
        at = at.next_multiple_of(alignment_bytes);
        let wanted = Slot { offset_bytes: at - binary.base_bytes, bytes };
        at += bytes;
        if *found != wanted {
            let shown = |slot: &Slot| format!("{} bytes at {}", slot.bytes, slot.offset_bytes);
            let (found, wanted) = (shown(found), shown(&wanted));
            failures.push(format!(
                "`{name}` reads parameter {index} as {found}, not {wanted}: sizes and alignments are those that the host knows"
            ));
        }
    }
    if binary.params.len() != demands.params.len() {
        failures.push(format!("`{name}` has {} parameters, not {}", binary.params.len(), demands.params.len()));
    }
    let wanted = at - binary.base_bytes;
    if binary.param_bytes != wanted {
        let found = binary.param_bytes;
        failures.push(format!("`{name}` has {found} bytes of parameters, not {wanted}, the sum of those that the kernel declares"));
    }
    if binary.threads != Some([demands.threads, 1, 1]) {
        let (found, wanted) = (binary.threads, demands.threads);
        failures.push(format!("`{name}` was assembled for {found:?} threads, not {wanted}: its registers are cut for another launch"));
    }
}

/// Barriers that a CTA has.
const CTA_BARRIERS: u32 = 16;

fn quoted_after<'l>(line: &'l str, lead: &str) -> Option<&'l str> {
    let (_, rest) = line.split_once(lead)?;
    rest.strip_prefix('\'')?.split('\'').next()
}

/// The number that stands right before `unit`; 0 where the line does not speak of it.
fn number_before(line: &str, unit: &str) -> u32 {
    line.split_once(unit).and_then(|(before, _)| before.rsplit([' ', ',']).next()).and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CROWDED: &str = "\
ptxas warning : Local memory used for function 'crowded', size of stack frame: 88 bytes
ptxas warning : Registers are spilled to local memory in function 'crowded', 84 bytes spill stores, 80 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'crowded' for 'sm_90a'
ptxas info    : Function properties for crowded
    88 bytes stack frame, 84 bytes spill stores, 80 bytes spill loads
ptxas info    : Used 32 registers, used 2 barriers, 88 bytes cumulative stack size, 8192 bytes smem
ptxas info    : Compile time = 10.266 ms
";

    fn assembly(allow_spill_bytes: u32, max_registers: Option<u32>) -> Assembly {
        Assembly {
            name: "a".to_string(),
            target: "sm_90a".to_string(),
            ptx: String::new(),
            allow_spill_bytes,
            max_registers,
            demands: None,
        }
    }

    #[test]
    fn resources_are_read() {
        let expected = EntryReport {
            entry: "crowded".to_string(),
            registers: 32,
            smem_bytes: 8192,
            stack_bytes: 88,
            spill_store_bytes: 84,
            spill_load_bytes: 80,
            barriers: 2,
            binary: None,
        };
        let parsed = parse(CROWDED);
        assert_eq!(parsed.entries, [expected]);
        assert_eq!(parsed.complaints, [""; 0], "judged by bytes, not twice");
    }

    #[test]
    fn spills_and_budgets_are_judged_by_what_is_declared() {
        let parsed = parse(CROWDED);
        assert_eq!(judge(&parsed, &assembly(84, Some(32))), [""; 0]);
        assert_eq!(
            judge(&parsed, &assembly(83, Some(31))),
            ["`crowded` spills 84 bytes (84 stored, 80 loaded); 83 are declared", "`crowded` uses 32 registers; its budget is 31"]
        );
    }

    /// The report of a kernel as its demands want it.
    fn agreed() -> (EntryReport, Demands) {
        // The constant bank leaves 16 bytes to the next multiple of 64.
        let slots = vec![Slot { offset_bytes: 0, bytes: 4 }, Slot { offset_bytes: 48, bytes: 128 }];
        let binary = BinaryReport { params: slots, param_bytes: 176, base_bytes: 0x210, threads: Some([384, 1, 1]) };
        let entry = EntryReport { entry: "k".to_string(), registers: 168, barriers: 3, binary: Some(binary), ..EntryReport::default() };
        (entry, Demands { registers_at_entry: Some(168), barriers: Barriers::Counted(3), params: vec![(4, 4), (128, 64)], threads: 384 })
    }

    type Change<'a> = &'a dyn Fn(&mut EntryReport, &mut BinaryReport);

    #[test]
    fn what_is_not_as_the_kernel_says_fails_with_both_values() {
        let (entry, demands) = agreed();
        let said = |change: Change<'_>| {
            let mut entry = entry.clone();
            let mut binary = entry.binary.take().unwrap_or_default();
            change(&mut entry, &mut binary);
            entry.binary = Some(binary);
            let assembly = Assembly { demands: Some(demands.clone()), ..assembly(0, Some(168)) };
            judge(&Parsed { entries: vec![entry], complaints: Vec::new() }, &assembly).join("\n")
        };
        assert_eq!(said(&|_, _| {}), "");
        let changes: [(Change<'_>, &str); 13] = [
            (&|e, _| e.registers = 128, "enters with 128 registers a thread, but its roles trade 168"),
            (&|e, _| e.registers = 176, "uses 176 registers; its budget is 168"),
            (&|e, _| e.smem_bytes = 1024, "has 1024 bytes of static shared memory, not 0"),
            (&|e, _| e.barriers = 4, "uses 4 barriers, not 3"),
            (&|e, _| e.barriers = 2, "uses 2 barriers, not 3"),
            (&|e, _| e.stack_bytes = 8, "holds 8 bytes in local memory; 0 are declared"),
            (&|e, _| e.spill_load_bytes = 4, "spills 4 bytes"),
            (&|_, b| b.params[1].offset_bytes = 64, "reads parameter 1 as 128 bytes at 64, not 128 bytes at 48"),
            (&|_, b| b.params[0].bytes = 8, "reads parameter 0 as 8 bytes at 0, not 4 bytes at 0"),
            (&|_, b| b.params.truncate(1), "has 1 parameters, not 2"),
            (&|_, b| b.param_bytes = 192, "has 192 bytes of parameters, not 176"),
            (&|_, b| b.threads = Some([256, 1, 1]), "was assembled for Some([256, 1, 1]) threads, not 384"),
            (&|_, b| b.threads = None, "was assembled for None threads, not 384"),
        ];
        for (change, words) in changes {
            assert!(said(change).contains(words), "{words}: {}", said(change));
        }
    }

    #[test]
    fn barriers_in_registers_are_bounded_and_full_threads_round_registers_up() {
        let (mut entry, mut demands) = agreed();
        demands.barriers = Barriers::AtLeast(3);
        demands.registers_at_entry = Some(256);
        // An instruction names 255 registers; the chip hands them out in eights.
        entry.registers = 255;
        let said = |entry: &EntryReport| {
            let mut failures = Vec::new();
            disagreements(entry, &demands, &mut failures);
            failures.join("\n")
        };
        for (barriers, words) in [(3, ""), (16, ""), (2, "uses 2 barriers, not 3 to 16"), (17, "uses 17 barriers, not 3 to 16")] {
            entry.barriers = barriers;
            assert!(said(&entry).contains(words) && said(&entry).is_empty() == words.is_empty(), "{barriers}: {}", said(&entry));
        }
    }

    #[test]
    fn local_memory_without_a_spill_is_judged_too() {
        let words = "ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
                     ptxas info    : Function properties for k\n    \
                     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
        let parsed = parse(words);
        assert_eq!(judge(&parsed, &assembly(0, None)), ["`k` holds 16 bytes in local memory; 0 are declared"]);
        assert_eq!(judge(&parsed, &assembly(16, None)), [""; 0]);
    }

    #[test]
    fn each_entry_has_its_own_line() {
        let two = CROWDED.to_string() + &CROWDED.replace("crowded", "other").replace("84", "0");
        let parsed = parse(&two);
        assert_eq!(parsed.entries.len(), 2);
        assert_eq!(parsed.entries[1].entry, "other");
        assert_eq!((parsed.entries[0].spill_store_bytes, parsed.entries[1].spill_store_bytes), (84, 0));
    }

    #[test]
    fn codes_warnings_and_errors_are_complaints() {
        let words = "ptxas info    : (C7519) warpgroup.arrive is injected\n\
                     ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\n\
                     ptxas fatal   : (C7602) does not fit\n\
                     ptxas warning : .maxntid is ignored\n\
                     ptxas a.ptx, line 3; error   : Unknown opcode\n\
                     ptxas info    : 0 bytes gmem\n";
        assert_eq!(parse(words).complaints.len(), 5);
    }
}
