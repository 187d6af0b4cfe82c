//! The text of a kernel in one form for all that mean the same: what `replay` compares.
//!
//! Left out are comments, line information and debug sections. Parameters go by their place and not by their name; reads of parameters, which no
//! instruction can change, stand first, in the order of the parameters; registers are numbered as they appear, and counted by type instead of
//! declared. So a parameter that is renamed or read a line earlier is no change, and everything else is one.

use std::collections::BTreeMap;
use std::collections::HashMap;

/// The lines of a text without comments, line information and debug sections.
pub(crate) fn without_sources(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines()
        .map(|line| line.split("//").next().unwrap_or("").trim())
        .take_while(|line| !line.starts_with(".section"))
        .filter(|line| !line.is_empty() && !line.starts_with(".loc") && !line.starts_with(".file"))
}

/// The canonical lines of a kernel.
pub(crate) fn canonical(ptx: &str) -> Vec<String> {
    let lines = without_sources(ptx);
    let mut parameters: HashMap<&str, usize> = HashMap::new();
    let mut registers: BTreeMap<String, usize> = BTreeMap::new();
    let (mut reads, mut rest) = (Vec::new(), Vec::new());
    for line in lines {
        if line.starts_with(".reg") {
            let of_type = line.split_whitespace().nth(1).unwrap_or("");
            *registers.entry(of_type.to_owned()).or_default() += line.matches('%').count();
            continue;
        }
        if line.starts_with(".param") {
            let next = parameters.len();
            parameters.extend(words(line).filter(|word| word.starts_with("arg_")).map(|name| (name, next)));
        }
        let mut place = None;
        let text = rewrite(line, |word| {
            if let Some(&index) = parameters.get(word) {
                place = Some(index);
                return Some(format!("arg#{index}"));
            }
            // Registers that live for one line alone.
            let digits = word.strip_prefix('t')?;
            (line.starts_with('{') && !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| "t#".to_owned())
        });
        match place {
            Some(index) if line.starts_with("ld.param") || line.starts_with("{ .reg") => reads.push((index, offset(line), text)),
            _ => rest.push(text),
        }
    }
    reads.sort();
    let body = rest.iter().position(|line| line == "{").map_or(0, |at| at + 1);
    rest.splice(body..body, reads.into_iter().map(|(_, _, text)| text));
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let mut lines: Vec<String> = rest
        .iter()
        .map(|line| {
            rewrite(line, |word| {
                let class = word.strip_prefix('%')?.trim_end_matches(|c: char| c.is_ascii_digit());
                let is_numbered = word.len() > class.len() + 1;
                let next = numbers.len();
                is_numbered.then(|| format!("%{class}#{}", numbers.entry(word.to_owned()).or_insert(next)))
            })
        })
        .collect();
    lines.extend(registers.into_iter().map(|(of_type, count)| format!("{count} registers {of_type}")));
    lines
}

/// The distance in bytes of a read from its parameter's start.
fn offset(line: &str) -> u32 {
    line.split_once('+').and_then(|(_, rest)| rest.split(']').next()).and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '%' | '$')
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c| !is_of_word(c)).filter(|word| !word.is_empty())
}

/// The line with some of its words replaced.
fn rewrite(line: &str, mut replace: impl FnMut(&str) -> Option<String>) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while !rest.is_empty() {
        let end = rest.find(is_of_word).unwrap_or(rest.len());
        text.push_str(&rest[..end]);
        rest = &rest[end..];
        let end = rest.find(|c| !is_of_word(c)).unwrap_or(rest.len());
        let word = &rest[..end];
        match (!word.is_empty()).then(|| replace(word)).flatten() {
            Some(other) => text.push_str(&other),
            None => text.push_str(word),
        }
        rest = &rest[end..];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::canonical;

    fn kernel(parameters: [&str; 2], body: &str) -> Vec<String> {
        let [first, second] = parameters;
        canonical(&format!(
            ".entry k(\n.param .b32 arg_{first},\n.param .align 64 .b8 arg_{second}[128]\n)\n{{\n.reg .b32 %r1, %r2;\n.reg .b64 %rd3;\n{body}\n}}\n"
        ))
    }

    const BODY: &str = "ld.param.b32 %r1, [arg_rows];\nmov.u32 %r2, %tid.x;\n{ .reg .b64 t1; mov.b64 t1, arg_map; cvta.param.u64 %rd3, t1; }\nadd.u32 %r2, %r2, %r1;";

    #[test]
    fn names_of_parameters_and_places_of_their_reads_are_no_change() {
        let then = kernel(["rows", "map"], BODY);
        let renamed = BODY.replace("rows", "height").replace("map", "x").replace("t1", "t4");
        assert_eq!(kernel(["height", "x"], &renamed), then);
        let moved = "{ .reg .b64 t1; mov.b64 t1, arg_map; cvta.param.u64 %rd1, t1; }\nmov.u32 %r7, %tid.x;\nld.param.b32 %r9, [arg_rows];\nadd.u32 %r7, %r7, %r9;";
        assert_eq!(kernel(["rows", "map"], moved), then);
    }

    #[test]
    fn everything_else_is_a_change() {
        let then = kernel(["rows", "map"], BODY);
        for (old, new) in [
            ("add.u32", "sub.u32"),
            ("add.u32 %r2, %r2, %r1", "add.u32 %r2, %r1, %r2"),
            ("%tid.x", "%tid.y"),
            ("[arg_rows]", "[arg_rows+4]"),
            ("ld.param.b32", "ld.param.b64"),
            ("mov.u32 %r2, %tid.x;\n", ""),
        ] {
            assert!(BODY.contains(old));
            assert_ne!(kernel(["rows", "map"], &BODY.replace(old, new)), then, "{old} -> {new}");
        }
        assert_ne!(kernel(["map", "rows"], BODY), then, "parameters that changed places");
    }
}
