//! The second reader finds in every text what it was printed from.

use super::kernels;
use super::table::{BATCH, Form, batch};
use crate::inst::Op;
use crate::inst_samples::samples;
use crate::ir::{KernelBody, Target};
use crate::ptx::print::print_body;
use crate::ptx::{Isa, read_back};

fn check(body: &KernelBody) -> usize {
    let text = print_body(body, Isa::V9_0);
    read_back(body, &text, Isa::V9_0).unwrap_or_else(|differs| panic!("{}: {differs}", body.name)).instructions
}

#[test]
fn every_sample_reads_back_as_itself() {
    let samples = samples();
    let ops: Vec<(usize, &Op)> = samples.iter().map(|sample| &sample.op).enumerate().collect();
    for form in [Form::Registers, Form::Constants, Form::Guarded] {
        let read: usize = ops.chunks(BATCH).map(|chunk| check(&batch(chunk, Target::Sm90a, form))).sum();
        assert_eq!(read, samples.len(), "{form:?}");
    }
    eprintln!("{} samples", samples.len());
}

#[test]
fn whole_kernels_read_back_as_themselves() {
    for body in [kernels::scale(), kernels::tile(), kernels::control(), kernels::bias_relu()] {
        check(&body);
    }
}

/// A stream of numbers that the seed alone decides.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// A token of a text: where it stands.
#[derive(Clone)]
struct Place {
    line: usize,
    start: usize,
    end: usize,
}

/// Words, numbers, modifiers and marks of all lines that are neither remarks nor line information. Each modifier of an opcode is a token.
fn places(text: &str) -> Vec<Place> {
    let mut places = Vec::new();
    let mut at = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let code = line.split("//").next().unwrap_or_default().trim_end();
        if code.trim_start().starts_with(".section") {
            break;
        }
        if ![".loc", ".file"].iter().any(|word| code.trim_start().starts_with(word)) {
            let bytes = code.as_bytes();
            let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b':' | b'-');
            let mut from = 0;
            while from < bytes.len() {
                let mut to = from + 1;
                if word(bytes[from]) && bytes[from] != b':' {
                    while to < bytes.len()
                        && (word(bytes[to]) && !(bytes[to] == b':' && bytes.get(to + 1) != Some(&b':') && bytes[to - 1] != b':'))
                    {
                        to += 1;
                    }
                }
                if !bytes[from].is_ascii_whitespace() && bytes[from] != b'.' {
                    places.push(Place { line: number + 1, start: at + from, end: at + to });
                }
                from = to;
            }
        }
        at += line.len();
    }
    places
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '-'))
}

/// Another token in the place of one: of the same text where there is one, for a slip rarely invents a word.
fn another(token: &str, tokens: &[&str], random: &mut Seeded) -> String {
    if let Ok(number) = token.parse::<i64>() {
        return [number + 1, number - 1, number ^ 16][random.below(3)].to_string();
    }
    let digits = ["0x", "0f", "0d"].iter().find_map(|lead| token.strip_prefix(lead));
    if let Some(last) = digits.and_then(|digits| digits.chars().last()) {
        let digit = if last == '7' { '6' } else { '7' };
        return format!("{}{digit}", &token[..token.len() - 1]);
    }
    if !is_name(token) {
        return [",", ";", "[", "]", "{", "}", "+", "!", "@"]
            .iter()
            .copied()
            .cycle()
            .skip(random.below(9))
            .find(|mark| *mark != token)
            .unwrap_or(",")
            .into();
    }
    // A register for a register, a label for a label, a modifier for a modifier.
    let kind = |token: &str| token.chars().next().filter(|c| matches!(c, '%' | '$'));
    for _ in 0..50 {
        let other = tokens[random.below(tokens.len())];
        if other != token && is_name(other) && kind(other) == kind(token) && !other.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            return other.into();
        }
    }
    format!("{token}x")
}

/// Texts that differ in one token, or by one line, from what the kernel prints as: each is found out.
fn plant(body: &KernelBody, seed: u64, rounds: usize) -> (usize, usize) {
    let text = print_body(body, Isa::V9_0);
    let places = places(&text);
    let tokens: Vec<&str> = places.iter().map(|place| &text[place.start..place.end]).collect();
    let mut random = Seeded(seed);
    let (mut planted, mut near) = (0, 0);
    let mut missed = Vec::new();
    let mut judge = |changed: String, line: usize, what: String| {
        if changed == text {
            return;
        }
        planted += 1;
        match read_back(body, &changed, Isa::V9_0) {
            Ok(_) => missed.push(format!("line {line}: {what}")),
            Err(differs) => near += usize::from(differs.line as usize == line || differs.rule.contains(&format!("line {line}"))),
        }
    };
    for round in 0..rounds {
        // Every token once where there is time for that, and tokens at random where there is not.
        let index = if rounds >= places.len() { round % places.len() } else { random.below(places.len()) };
        let Place { line, start, end } = places[index].clone();
        let token = tokens[index];
        let with = |token: &str| format!("{}{token}{}", &text[..start], &text[end..]);
        let other = another(token, &tokens, &mut random);
        judge(with(&other), line, format!("`{token}` became `{other}`"));
        if is_name(token) {
            judge(with(""), line, format!("`{token}` left out"));
        }
    }
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    for (index, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or_default().trim();
        if code.is_empty() || [".loc", ".file", ".section", ".b8", "$$"].iter().any(|word| code.starts_with(word)) {
            continue;
        }
        if code == "{" || code == "}" {
            continue;
        }
        let without: String = lines.iter().enumerate().filter(|(i, _)| *i != index).map(|(_, line)| *line).collect();
        judge(without, index + 1, format!("`{code}` dropped"));
        let twice: String = lines.iter().enumerate().map(|(i, line)| if i == index { line.repeat(2) } else { line.to_string() }).collect();
        judge(twice, index + 1, format!("`{code}` twice"));
    }
    assert!(missed.is_empty(), "{} of {planted} changes of {} went unseen (seed {seed}):\n{}", missed.len(), body.name, missed.join("\n"));
    (planted, near)
}

#[test]
fn no_change_of_a_text_goes_unseen() {
    let samples = samples();
    let (mut planted, mut near) = (0, 0);
    let mut add = |(more, nearer): (usize, usize)| (planted, near) = (planted + more, near + nearer);
    for (seed, body) in [kernels::scale(), kernels::tile(), kernels::control(), kernels::bias_relu()].iter().enumerate() {
        let tokens = places(&print_body(body, Isa::V9_0)).len();
        add(plant(body, seed as u64 + 1, 3 * tokens));
    }
    // The whole table in a few kernels, a few of whose thousands of tokens change.
    let spread: Vec<(usize, &Op)> = samples.iter().map(|sample| &sample.op).enumerate().step_by(37).collect();
    for form in [Form::Registers, Form::Constants, Form::Guarded] {
        add(plant(&batch(&spread, Target::Sm90a, form), 11, 400));
    }
    eprintln!("{planted} changes, {near} of them named by their line");
}

#[test]
fn a_difference_names_the_line_and_both_spellings() {
    let (tile, control, scale) = (kernels::tile(), kernels::control(), kernels::scale());
    for (body, from, to, words) in [
        // Orders, scopes, proxies and roundings: what no interpreter would notice.
        (&tile, "try_wait.parity.acquire.cta", "try_wait.parity.relaxed.cta", "`.acquire` must stand"),
        (&tile, "try_wait.parity.acquire.cta", "try_wait.parity.acquire.cluster", "MbarrierTest { kind: Try, scope: Cta }"),
        (
            &tile,
            "fence.proxy.async.shared::cta;",
            "fence.proxy.async.global;",
            "fence: ProxyAsyncGlobal }, not MemoryFence { fence: ProxyAsyncShared",
        ),
        (&control, "atom.relaxed.gpu", "atom.acq_rel.cta", "order: AcqRel(Cta) }, not Atom"),
        (&scale, "fma.rn.f32", "fma.rz.f32", "rounding: Zero"),
        (&scale, "fma.rn.f32", "fma.rn.ftz.f32", "ftz: true"),
        (&tile, "k16.f32.bf16.bf16 {%f12, %f13,", "k16.f32.bf16.bf16 {%f13, %f12,", "result 0 is r12, not `%f13`"),
        (&tile, "%k_false, 1, 1, 0, 0;", "%k_false, 1, 1, 1, 0;", "transpose_a: true"),
        // Registers, numbers, guards and branches.
        (&scale, "mad.wide.u32 %rd8, %r6, 4, %rd0;", "mad.wide.u32 %rd8, %r6, 4, %rd1;", "operand 2 is r0, not `%rd1`"),
        (&scale, "0f40000000", "0f40000001", "operand 1 is the constant 0x40000000, not `0f40000001`"),
        (&scale, "[%rd8]", "[%rd8+4]", "operand 1 is the constant 0x0, not the offset 4"),
        (&tile, "@%p8 cp.async", "@!%p8 cp.async", "the guard has the other sense"),
        (
            &tile,
            "setp.ge.u32 %role_0, %r1, 4;",
            "setp.gt.u32 %role_0, %r1, 4;",
            "warps {0, 1, 2, 3, 4} come here, but the role has {0, 1, 2, 3}",
        ),
        (&control, "@!%p8 bra $else_4;", "@!%p8 bra $endif_4;", "`$endif_4` must stand here, where the jump in line"),
        (&control, "mov.b16 %k16_4000, 0x4000;", "mov.b16 %k16_4000, 0x4001;", "not 0x4001, which `%k16_4000` is set to in line"),
        // The frame.
        (&tile, ".reqntid 256", ".reqntid 128", "the number of threads is 128 in the text"),
        (&scale, ".param .b32 arg_n", ".param .b64 arg_n", "the size of parameter `arg_n` is 8 in the text"),
        (&tile, ".param .align 64 .b8 arg_a[128]", ".param .align 64 .b8 arg_a[64]", "the size of parameter `arg_a` is 64"),
        (&tile, ".reqnctapercluster 2", ".reqnctapercluster 4", "the number of CTAs of a cluster is 4"),
    ] {
        let text = print_body(body, Isa::V9_0);
        assert!(text.contains(from), "{from}");
        let at = text[..text.find(from).unwrap_or_default()].matches('\n').count() + 1;
        let differs = read_back(body, &text.replacen(from, to, 1), Isa::V9_0).expect_err(to);
        let said = differs.to_string();
        assert!(said.contains(words), "{from} -> {to}: {said}");
        // Where a branch or a constant is wrong, the line that suffers from it is named beside.
        assert!(differs.line as usize == at || differs.rule.contains("line") || from.contains("role"), "{from} -> {to}, line {at}: {said}");
    }
}
