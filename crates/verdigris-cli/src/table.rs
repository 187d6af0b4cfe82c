//! What is printed: aligned columns, and colour for terminals.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

/// Why something could not be printed: the first failure, after which no more is.
static UNSAID: OnceLock<io::Error> = OnceLock::new();

/// Prints the text to stdout. Where that fails, nothing more is printed, and the command goes on to its verdict: the exit code is read where the text is not.
/// [`crate::exit_code`] tells of a failure, unless it is that the reader has gone.
pub fn say_text(text: &str) {
    if UNSAID.get().is_none()
        && let Err(error) = put(text)
    {
        // Of two threads that fail one is told of.
        let _ = UNSAID.set(error);
    }
}

/// Prints the text to stdout if that is possible: for a service, which serves whether or not its log is read.
pub fn mention_text(text: &str) {
    let _ = put(text);
}

fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    // What a line's end has not sent would be lost without a word.
    out.flush()
}

/// Why what [`say_text`] was given is not, or not wholly, where stdout leads; `None` too where only the reader has gone.
pub fn unsaid() -> Option<&'static io::Error> {
    UNSAID.get().filter(|error| error.kind() != io::ErrorKind::BrokenPipe)
}

/// Which way a column is aligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Rows of text under a head, every column as wide as its widest cell.
pub fn print(head: &[(&str, Align)], rows: &[Vec<String>]) {
    say_text(&layout(head, rows));
}

fn layout(head: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].0.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    let heads: Vec<String> = head.iter().map(|(name, _)| (*name).to_owned()).collect();
    for row in std::iter::once(&heads).chain(rows) {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let gap = " ".repeat(widths.get(column).copied().unwrap_or(0).saturating_sub(cell.chars().count()));
            match head.get(column).map(|(_, align)| *align) {
                Some(Align::Right) => line += &format!("{gap}{cell}"),
                _ => line += &format!("{cell}{gap}"),
            }
            line += "  ";
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// The text in lines of at most so many columns, broken between words; all but the first line begin with `indent` spaces. A word that is
/// longer stands alone on its line.
pub fn wrapped(text: &str, indent: usize, columns: usize) -> String {
    let begin = &text[..text.len() - text.trim_start().len()];
    let mut lines = vec![begin.to_owned()];
    let mut is_first_word = true;
    for word in text.split_whitespace() {
        let at = lines.len() - 1;
        let gap = usize::from(!is_first_word);
        if is_first_word || lines[at].chars().count() + gap + word.chars().count() <= columns {
            lines[at] += &format!("{}{word}", " ".repeat(gap));
        } else {
            lines.push(format!("{}{word}", " ".repeat(indent)));
        }
        is_first_word = false;
    }
    lines.join("\n")
}

/// The text in red on a terminal.
pub fn alarm(text: &str) -> String {
    if std::io::stdout().is_terminal() { format!("\x1b[31m{text}\x1b[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        assert_eq!(wrapped("  name: one two three", 4, 13), "  name: one\n    two three");
        assert_eq!(wrapped("short", 2, 13), "short");
        assert_eq!(wrapped("a wordlongerthanaline b", 2, 8), "a\n  wordlongerthanaline\n  b");
        assert_eq!(wrapped("", 2, 8), "");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![vec!["µs".to_owned(), "1.5".to_owned()], vec!["longer".to_owned(), "10.25".to_owned()]];
        let text = layout(&[("a", Align::Left), ("b", Align::Right)], &rows);
        assert_eq!(text, "a           b\nµs        1.5\nlonger  10.25\n");
    }
}
