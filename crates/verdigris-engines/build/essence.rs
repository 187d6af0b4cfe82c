//! What of a source file can shape a kernel's text: its tokens, without comments, white space and unit tests.

/// The tokens of Rust source, parted by spaces, without comments, documentation and modules under `#[cfg(test)]`.
pub(crate) fn essence(source: &str) -> String {
    without_tests(&tokens(source)).join(" ")
}

/// Tokens as far as a hash needs them: words, literals and single marks.
fn tokens(source: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = if first.is_whitespace() {
            rest = &rest[first.len_utf8()..];
            continue;
        } else if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
            continue;
        } else if rest.starts_with("/*") {
            rest = &rest[block_comment(rest)..];
            continue;
        } else if let Some(length) = raw_string(rest) {
            length
        } else if first == '"' || rest.starts_with("b\"") || rest.starts_with("c\"") {
            quoted(rest, '"')
        } else if first == '\'' || rest.starts_with("b'") {
            character_or_lifetime(rest)
        } else {
            rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|&end| end > 0).unwrap_or(match first {
                c if c.is_alphanumeric() || c == '_' => rest.len(),
                mark => mark.len_utf8(),
            })
        };
        tokens.push(&rest[..length]);
        rest = &rest[length..];
    }
    tokens
}

/// Bytes of the comment that `text` begins with; comments nest.
fn block_comment(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            (at, depth) = (at + 2, depth + 1);
        } else if text[at..].starts_with("*/") {
            (at, depth) = (at + 2, depth - 1);
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Bytes of the raw string that `text` begins with, if it does.
fn raw_string(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r"].into_iter().find(|prefix| text.starts_with(prefix))?.len();
    let hashes = text[prefix..].bytes().take_while(|&byte| byte == b'#').count();
    let open = prefix + hashes;
    if !text[open..].starts_with('"') {
        return None;
    }
    let close = format!("\"{}", "#".repeat(hashes));
    Some(text[open + 1..].find(&close).map_or(text.len(), |end| open + 1 + end + close.len()))
}

/// Bytes of the literal that `text` begins with, up to its unescaped end.
fn quoted(text: &str, mark: char) -> usize {
    let begin = text.find(mark).map_or(text.len(), |at| at + 1);
    let mut is_escaped = false;
    for (at, c) in text[begin..].char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == mark => return begin + at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Bytes of a character's literal, or of a lifetime's mark.
fn character_or_lifetime(text: &str) -> usize {
    let begin = text.find('\'').map_or(0, |at| at + 1);
    let mut inside = text[begin..].chars();
    match (inside.next(), inside.next()) {
        (Some('\\'), _) | (Some(_), Some('\'')) => quoted(text, '\''),
        _ => begin,
    }
}

const TEST_ATTRIBUTE: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];

/// The tokens without the items under `#[cfg(test)]`: up to the end of a block, or a semicolon in front of one.
fn without_tests<'s>(tokens: &[&'s str]) -> Vec<&'s str> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].starts_with(&TEST_ATTRIBUTE) {
            kept.push(tokens[at]);
            at += 1;
            continue;
        }
        at += TEST_ATTRIBUTE.len();
        let mut depth = 0;
        while at < tokens.len() {
            let token = tokens[at];
            at += 1;
            match token {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 && (token == "}" || token == ";") {
                break;
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::essence;

    const CODE: &str = r##"
/// Doubles.
fn double<'a>(x: &'a str) -> char {
    let raw = r#"// no comment " here"#; /* a /* nested */ comment */
    let text = "a \" // b"; // said
    if x == text { '"' } else { '\'' }
}
"##;

    #[test]
    fn comments_space_and_tests_do_not_count() {
        let told = CODE.replace("/// Doubles.", "// Twice,\n// or so.").replace("    ", "\t").replace("// said", "");
        assert_eq!(essence(&told), essence(CODE));
        let tested = format!("{CODE}\n#[cfg(test)]\nmod tests {{\n    fn f() {{ {{}} }}\n}}\n");
        assert_eq!(essence(&tested), essence(CODE));
        assert_eq!(essence(&format!("#[cfg(test)]\nmod tests;\n{CODE}")), essence(CODE));
        assert_eq!(essence("fn f<'a>(x: &'a u8) { g(b'\\'', 'x') }"), "fn f < ' a > ( x : & ' a u8 ) { g ( b'\\'' , 'x' ) }");
    }

    #[test]
    fn everything_else_counts() {
        for (old, new) in [
            ("// no comment", "// a comment"),
            ("a \\\" // b", "a \\\" // c"),
            ("'\"'", "'x'"),
            ("'\\''", "'y'"),
            ("x == text", "x != text"),
            ("fn double", "fn twice"),
        ] {
            assert!(CODE.contains(old), "{old}");
            assert_ne!(essence(&CODE.replace(old, new)), essence(CODE), "{old}");
        }
    }
}
