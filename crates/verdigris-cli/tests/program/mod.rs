//! A program as its users meet it: what it prints, and the code that it ends with.

use std::path::Path;
use std::process::{Command, Output};

/// The path of a program that cargo has built for these tests.
pub(crate) struct Program(pub(crate) &'static str);

impl Program {
    /// Runs it in the repository's root, where its lists are.
    pub(crate) fn run(&self, words: &[&str]) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = if root.is_dir() { root } else { ".".into() };
        let mut command = Command::new(self.0);
        command.args(words).current_dir(root).env("VERDIGRIS_CACHE", "off").env_remove("VERDIGRIS_PTXAS");
        command.output().expect("the program starts")
    }

    /// The one line of an error that ends it with code 2.
    pub(crate) fn refused(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// What it printed.
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
