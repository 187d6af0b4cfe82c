//! Just enough of Rust's grammar to know which paths a file names, and whether it does so in test code.
//!
//! Comments, strings and character literals are dropped first, so prose never trips a rule. What remains
//! are identifiers and punctuation; from these come the paths (`use` trees are spread out) with the
//! module that names them. Macro bodies are read like any other code.

/// One token with the line that it stands on (from 1).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Token {
    kind: Kind,
    line: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Ident(String),
    Punct(char),
    /// A string, character or number; its content never matters here.
    Literal,
}

/// A path that a file names, such as `crate::face::Val`, made absolute where it starts at
/// `crate`, `self` or `super`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    /// Segments; for a path into the own crate the first is `crate`, and a glob ends in `*`.
    pub(crate) path: Vec<String>,
    /// What it is called here, where a `use … as name` renames it.
    pub(crate) alias: Option<String>,
    /// Line in the file, from 1.
    pub(crate) line: usize,
    /// Inside `#[cfg(test)]` or `#[test]`.
    pub(crate) in_test: bool,
    /// Part of a `use` declaration.
    pub(crate) in_use: bool,
}

/// What one source file names.
#[derive(Debug, Default)]
pub(crate) struct Source {
    /// All paths with at least two segments.
    pub(crate) named: Vec<Named>,
    /// Modules declared here whose file is test code: `#[cfg(test)] mod x;`.
    pub(crate) test_modules: Vec<Vec<String>>,
    /// Names of all modules declared here, in place or by file, with their lines.
    pub(crate) modules: Vec<(String, usize)>,
    /// Lines that carry the keyword `unsafe`.
    pub(crate) unsafe_lines: Vec<usize>,
    /// Carries the inner attribute `#![forbid(unsafe_code)]`.
    pub(crate) forbids_unsafe: bool,
}

/// The module path of a source file within its crate: `src/tile/ring.rs` is `["tile", "ring"]`, and the
/// crate root is empty. `inside` is the path from the crate's `src/` on.
pub(crate) fn module_of(inside: &str) -> Vec<String> {
    let stem = inside.strip_suffix(".rs").unwrap_or(inside);
    let mut path: Vec<String> = stem.split('/').map(str::to_string).collect();
    if path.last().is_some_and(|last| last == "mod") {
        path.pop();
    }
    if path == ["lib"] || path == ["main"] {
        path.clear();
    }
    path
}

/// Reads a file that stands for `module` in its crate.
pub(crate) fn read(text: &str, module: &[String]) -> Source {
    let tokens = tokens(text);
    let mut reader = Reader {
        tokens: &tokens,
        at: 0,
        scopes: vec![Scope { module: module.to_vec(), test: false }],
        pending_test: false,
        source: Source::default(),
    };
    reader.run();
    reader.source
}

struct Scope {
    module: Vec<String>,
    test: bool,
}

struct Reader<'t> {
    tokens: &'t [Token],
    at: usize,
    scopes: Vec<Scope>,
    /// A test attribute was seen, and the item that it belongs to has not yet opened or ended.
    pending_test: bool,
    source: Source,
}

impl Reader<'_> {
    fn run(&mut self) {
        let mut opening_module: Option<String> = None;
        while self.at < self.tokens.len() {
            let token = &self.tokens[self.at];
            match &token.kind {
                Kind::Punct('#') if self.punct(self.at + 1, '[') || self.punct(self.at + 1, '!') => {
                    self.attribute();
                    continue;
                }
                Kind::Punct('{') => {
                    let outer = &self.scopes[self.scopes.len() - 1];
                    let mut module = outer.module.clone();
                    let test = outer.test || self.pending_test;
                    module.extend(opening_module.take());
                    self.scopes.push(Scope { module, test });
                    self.pending_test = false;
                }
                Kind::Punct('}') if self.scopes.len() > 1 => {
                    self.scopes.pop();
                }
                Kind::Punct(';') => self.pending_test = false,
                Kind::Ident(word) if word == "unsafe" => self.source.unsafe_lines.push(token.line),
                Kind::Ident(word) if word == "mod" => {
                    if let Some(name) = self.ident(self.at + 1) {
                        let name = name.to_string();
                        self.source.modules.push((name.clone(), token.line));
                        if self.punct(self.at + 2, '{') {
                            opening_module = Some(name);
                        } else if self.pending_test && self.punct(self.at + 2, ';') {
                            let mut path = self.scopes[self.scopes.len() - 1].module.clone();
                            path.push(name);
                            self.source.test_modules.push(path);
                        }
                    }
                }
                Kind::Ident(word) if word == "use" => {
                    self.at += 1;
                    if self.separator(self.at) {
                        self.at += 2; // `use ::name`
                    }
                    self.tree(Vec::new(), true);
                    continue;
                }
                Kind::Ident(_) if self.separator(self.at + 1) && !self.follows_separator() => {
                    self.tree(Vec::new(), false);
                    continue;
                }
                _ => {}
            }
            self.at += 1;
        }
    }

    /// Steps over `#[…]` or `#![…]` and notes what it means for us.
    fn attribute(&mut self) {
        let inner = self.punct(self.at + 1, '!');
        self.at += if inner { 2 } else { 1 };
        let mut depth = 0usize;
        let mut words = Vec::new();
        while let Some(token) = self.tokens.get(self.at) {
            self.at += 1;
            match &token.kind {
                Kind::Punct('[') => depth += 1,
                Kind::Punct(']') => {
                    depth -= 1;
                    if depth == 0 {
                        break;
                    }
                }
                Kind::Ident(word) => words.push(word.as_str()),
                _ => {}
            }
        }
        let has = |wanted: &str| words.contains(&wanted);
        if inner {
            self.source.forbids_unsafe |= has("forbid") && has("unsafe_code");
        } else if has("test") && !has("not") {
            self.pending_test = true;
        }
    }

    /// Reads one path or `use` tree that goes on after `prefix`, and notes every leaf.
    fn tree(&mut self, mut prefix: Vec<String>, in_use: bool) {
        let line = self.tokens.get(self.at).map_or(0, |token| token.line);
        loop {
            match self.tokens.get(self.at).map(|token| &token.kind) {
                Some(Kind::Ident(word)) => {
                    // `self` that closes a group names the group's own prefix.
                    if word != "self" || prefix.is_empty() {
                        prefix.push(word.clone());
                    }
                    self.at += 1;
                }
                Some(Kind::Punct('*')) if in_use => {
                    prefix.push("*".to_string());
                    self.at += 1;
                }
                Some(Kind::Punct('{')) if in_use => {
                    self.at += 1;
                    while self.at < self.tokens.len() && !self.punct(self.at, '}') {
                        let before = self.at;
                        self.tree(prefix.clone(), true);
                        if self.punct(self.at, ',') {
                            self.at += 1;
                        }
                        if self.at == before {
                            self.at += 1; // never stand still on what we cannot read
                        }
                    }
                    self.at += 1;
                    return;
                }
                _ => break,
            }
            if !self.separator(self.at) {
                break;
            }
            let next = self.tokens.get(self.at + 2).map(|token| &token.kind);
            let goes_on = match next {
                Some(Kind::Ident(_)) => true,
                Some(Kind::Punct('{' | '*')) => in_use,
                _ => false,
            };
            self.at += 2;
            if !goes_on {
                break;
            }
        }
        let mut alias = None;
        if in_use && self.ident(self.at) == Some("as") {
            alias = self.ident(self.at + 1).map(str::to_string);
            self.at += 2;
        }
        if prefix.len() > 1 || (in_use && !prefix.is_empty()) {
            let scope = &self.scopes[self.scopes.len() - 1];
            self.source.named.push(Named {
                path: absolute(prefix, &scope.module),
                alias,
                line,
                in_test: scope.test || self.pending_test,
                in_use,
            });
        }
    }

    fn punct(&self, at: usize, wanted: char) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == Kind::Punct(wanted))
    }

    fn separator(&self, at: usize) -> bool {
        self.punct(at, ':') && self.punct(at + 1, ':')
    }

    fn follows_separator(&self) -> bool {
        self.at >= 2 && self.separator(self.at - 2)
    }

    fn ident(&self, at: usize) -> Option<&str> {
        match &self.tokens.get(at)?.kind {
            Kind::Ident(word) => Some(word),
            _ => None,
        }
    }
}

/// Turns `self::x` and `super::x`, seen from `module`, into `crate::…::x`; leaves other paths alone.
fn absolute(path: Vec<String>, module: &[String]) -> Vec<String> {
    let mut here = module.to_vec();
    let mut rest = path.as_slice();
    match rest.first().map(String::as_str) {
        Some("self") => rest = &rest[1..],
        Some("super") => {
            while rest.first().is_some_and(|word| word == "super") {
                here.pop();
                rest = &rest[1..];
            }
        }
        _ => return path,
    }
    let mut whole = vec!["crate".to_string()];
    whole.extend(here);
    whole.extend_from_slice(rest);
    whole
}

/// Splits a source text into tokens, dropping comments, lifetimes and the content of literals.
fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut out = Vec::new();
    let mut line = 1;
    let mut i = 0;
    while i < chars.len() {
        let c = chars[i];
        let start_line = line;
        let mut push = |kind| {
            out.push(Token { kind, line: start_line });
        };
        if c == '\n' {
            line += 1;
            i += 1;
        } else if c.is_whitespace() {
            i += 1;
        } else if c == '/' && at(i + 1) == '/' {
            while i < chars.len() && chars[i] != '\n' {
                i += 1;
            }
        } else if c == '/' && at(i + 1) == '*' {
            let mut depth = 0usize;
            while i < chars.len() {
                if chars[i] == '/' && at(i + 1) == '*' {
                    depth += 1;
                    i += 2;
                } else if chars[i] == '*' && at(i + 1) == '/' {
                    depth -= 1;
                    i += 2;
                    if depth == 0 {
                        break;
                    }
                } else {
                    line += usize::from(chars[i] == '\n');
                    i += 1;
                }
            }
        } else if let Some((open, hashes)) = raw_string(&chars, i) {
            i = open + 1;
            while i < chars.len() {
                let closes = chars[i] == '"' && (0..hashes).all(|step| at(i + 1 + step) == '#');
                line += usize::from(chars[i] == '\n');
                i += 1;
                if closes {
                    i += hashes;
                    break;
                }
            }
            push(Kind::Literal);
        } else if c == '"' || (matches!(c, 'b' | 'c') && at(i + 1) == '"') {
            i += if c == '"' { 1 } else { 2 };
            while i < chars.len() && chars[i] != '"' {
                if chars[i] == '\\' {
                    line += usize::from(at(i + 1) == '\n');
                    i += 1;
                } else {
                    line += usize::from(chars[i] == '\n');
                }
                i += 1;
            }
            i += 1;
            push(Kind::Literal);
        } else if c == '\'' {
            // A character literal closes one place on, or opens with an escape; anything else is a lifetime.
            if at(i + 1) == '\\' {
                i += 3;
                while i < chars.len() && chars[i] != '\'' {
                    i += 1;
                }
                i += 1;
                push(Kind::Literal);
            } else if at(i + 2) == '\'' {
                i += 3;
                push(Kind::Literal);
            } else {
                i += 1;
                while at(i).is_alphanumeric() || at(i) == '_' {
                    i += 1;
                }
            }
        } else if c.is_ascii_digit() {
            while at(i).is_alphanumeric() || at(i) == '_' {
                i += 1;
            }
            push(Kind::Literal);
        } else if c.is_alphabetic() || c == '_' {
            let from = i;
            while at(i).is_alphanumeric() || at(i) == '_' {
                i += 1;
            }
            push(Kind::Ident(chars[from..i].iter().collect()));
        } else {
            i += 1;
            push(Kind::Punct(c));
        }
    }
    out
}

/// Where a raw string that begins at `i` has its opening quote, and how many `#` it carries.
fn raw_string(chars: &[char], i: usize) -> Option<(usize, usize)> {
    let mut j = i;
    if matches!(chars[j], 'b' | 'c') {
        j += 1;
    }
    if chars.get(j) != Some(&'r') {
        return None;
    }
    j += 1;
    let hashes = chars[j..].iter().take_while(|c| **c == '#').count();
    (chars.get(j + hashes) == Some(&'"')).then_some((j + hashes, hashes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str, module: &str) -> Vec<String> {
        let module = module_of(module);
        read(text, &module).named.iter().map(|named| named.path.join("::")).collect()
    }

    #[test]
    fn use_trees_are_spread_and_made_absolute() {
        let text = "use crate::{face::{Val, self}, ir::*};\nuse super::ring as r;\nuse self::x::Y;";
        assert_eq!(
            paths(text, "tile/map.rs"),
            ["crate::face::Val", "crate::face", "crate::ir::*", "crate::tile::ring", "crate::tile::map::x::Y"]
        );
    }

    #[test]
    fn paths_in_expressions_and_types_are_seen() {
        let text = "fn f(x: &crate::tile::Ring) { super::face::go::<u32>(); Vec::<u8>::new(); }";
        assert_eq!(paths(text, "interp.rs"), ["crate::tile::Ring", "crate::face::go"]);
    }

    #[test]
    fn prose_strings_and_characters_name_nothing() {
        let text = "// crate::tile::A\n/* crate::b /* crate::c */ */\nconst S: &str = \"crate::tile\";\n\
                    const R: &str = r#\"crate::\"tile\"#; const C: char = '\"'; const D: char = '\\'';\n\
                    fn f<'a>(x: &'a str) { let _ = b\"crate::x\"; crate::face::real(); }";
        assert_eq!(paths(text, "lib.rs"), ["crate::face::real"]);
    }

    #[test]
    fn test_code_is_told_apart() {
        let text = "use crate::ir::A;\n#[cfg(test)]\nmod tests { use crate::face::B; fn f() { super::c::d(); } }\n\
                    use crate::ir::C;\n#[cfg(test)]\nmod probes;\n#[cfg(not(test))]\nuse crate::ir::D;";
        let source = read(text, &module_of("verify/sync.rs"));
        let seen: Vec<_> = source.named.iter().map(|named| (named.path.join("::"), named.in_test)).collect();
        let expected = [
            ("crate::ir::A", false),
            ("crate::face::B", true),
            ("crate::verify::sync::c::d", true),
            ("crate::ir::C", false),
            ("crate::ir::D", false),
        ];
        assert_eq!(seen, expected.map(|(path, in_test)| (path.to_string(), in_test)));
        assert_eq!(source.test_modules, [["verify", "sync", "probes"]]);
    }

    #[test]
    fn lines_survive_multi_line_literals() {
        let text = "const A: &str = \"one\ntwo\";\nconst B: &str = r\"x\ny\";\nuse crate::here::Now;";
        assert_eq!(read(text, &[]).named[0].line, 5);
    }

    #[test]
    fn unsafe_and_its_ban_are_seen() {
        let source = read("#![forbid(unsafe_code)]\n// unsafe\nfn f() { unsafe { g() } }", &[]);
        assert!(source.forbids_unsafe);
        assert_eq!(source.unsafe_lines, [3]);
    }
}
