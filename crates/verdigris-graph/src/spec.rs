//! What an op is, as data: the table that JSON, the Python stubs and the page of ops are held against.
//!
//! Each op describes itself once ([`Op::spec`] gives the description, [`SPECS`] all of them) beside its struct under [`crate::ops`]; what
//! runs it stands in one trait implementation for each crate, which [`crate::each_op`] asks of every op. [`page`] is `docs/ops.md`,
//! [`stubs`] the builder methods of the Python package's `_native.pyi`.
//!
//! [`Op::spec`]: crate::Op::spec

use std::fmt::Write as _;

use crate::op::Role;
pub use crate::op::SPECS;

/// One op of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpSpec {
    /// The name in JSON.
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: &'static str,
    /// Its forms: one, or several that are told apart by name within the op.
    pub forms: &'static [Form],
}

/// One form of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Form {
    /// The name in JSON within the op; empty where the op has one form.
    pub name: &'static str,
    /// What is computed.
    pub formula: &'static str,
    /// The tensors.
    pub operands: &'static [OperandSpec],
    /// What the op is told besides its tensors.
    pub attributes: &'static [AttributeSpec],
    /// How the dims of results follow from those of operands.
    pub shape: &'static str,
    /// The rule of differentiation.
    pub gradient: &'static str,
    /// The methods of Python's `Graph` that make it.
    pub methods: &'static [Method],
}

/// Whether a tensor must be there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// Always.
    Required,
    /// It may be left out.
    Optional,
    /// A list of at least one.
    Several,
}

/// A tensor of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OperandSpec {
    /// The field.
    pub name: &'static str,
    /// Read or written; `None` where an attribute says which.
    pub role: Option<Role>,
    /// Whether it must be there.
    pub presence: Presence,
    /// Dims and types.
    pub holds: &'static str,
}

impl OperandSpec {
    /// One that is read.
    pub const fn read(name: &'static str, holds: &'static str) -> OperandSpec {
        OperandSpec { name, role: Some(Role::Input), presence: Presence::Required, holds }
    }

    /// One that is written.
    pub const fn written(name: &'static str, holds: &'static str) -> OperandSpec {
        OperandSpec { name, role: Some(Role::Output), presence: Presence::Required, holds }
    }

    /// One that is read or written, as an attribute says.
    pub const fn either(name: &'static str, holds: &'static str) -> OperandSpec {
        OperandSpec { name, role: None, presence: Presence::Required, holds }
    }

    /// The same, which may be left out.
    pub const fn optional(self) -> OperandSpec {
        OperandSpec { presence: Presence::Optional, ..self }
    }

    /// The same, as a list.
    pub const fn several(self) -> OperandSpec {
        OperandSpec { presence: Presence::Several, ..self }
    }
}

/// An attribute of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttributeSpec {
    /// The field; `spec.axis` is the field `axis` of the field `spec`.
    pub name: &'static str,
    /// What its values are.
    pub kind: &'static str,
    /// The value that stands for one that is left out, as JSON; `None` where it may not be left out.
    pub default: Option<&'static str>,
    /// What is checked.
    pub check: &'static str,
    /// A value, as JSON, that the check refuses.
    pub refused: &'static str,
}

impl AttributeSpec {
    /// An attribute that is always said.
    pub const fn new(name: &'static str, kind: &'static str, check: &'static str, refused: &'static str) -> AttributeSpec {
        AttributeSpec { name, kind, default: None, check, refused }
    }

    /// The same, with the value of one that is left out.
    pub const fn or(self, default: &'static str) -> AttributeSpec {
        AttributeSpec { default: Some(default), ..self }
    }
}

/// A method of Python's `Graph`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Method {
    /// Its name.
    pub name: &'static str,
    /// Its parameters after `self`, as in a stub.
    pub parameters: &'static str,
    /// The type of its result.
    pub returns: &'static str,
}

impl Method {
    /// A method that gives one tensor.
    pub const fn new(name: &'static str, parameters: &'static str) -> Method {
        Method { name, parameters, returns: "Uid" }
    }

    /// The same, which gives two.
    pub const fn two(self) -> Method {
        self.giving("tuple[Uid, Uid]")
    }

    /// The same with a result of this type.
    pub const fn giving(self, returns: &'static str) -> Method {
        Method { returns, ..self }
    }

    /// The parameters one by one, `*` among them.
    pub fn parameters(&self) -> Vec<&'static str> {
        let (mut depth, mut from, mut list) = (0, 0, Vec::new());
        for (at, letter) in self.parameters.char_indices() {
            match letter {
                '[' => depth += 1,
                ']' => depth -= 1,
                ',' if depth == 0 => {
                    list.push(self.parameters[from..at].trim());
                    from = at + 1;
                }
                _ => {}
            }
        }
        list.push(self.parameters[from..].trim());
        list
    }
}

/// The longest line of a stub.
const STUB_COLUMNS: usize = 140;

/// The stubs of the builder methods, in the order of the table, indented as members of a class.
pub fn stubs() -> String {
    let mut text = String::new();
    for method in SPECS.iter().flat_map(|spec| spec.forms).flat_map(|form| form.methods) {
        let Method { name, returns, .. } = method;
        let parameters = method.parameters();
        let line = format!("    def {name}(self, {}) -> {returns}: ...\n", parameters.join(", "));
        if line.trim_end().chars().count() <= STUB_COLUMNS {
            text += &line;
            continue;
        }
        let _ = writeln!(text, "    def {name}(\n        self,");
        for parameter in parameters {
            let _ = writeln!(text, "        {parameter},");
        }
        let _ = writeln!(text, "    ) -> {returns}: ...");
    }
    text
}

/// The page of ops, as Markdown.
pub fn page() -> String {
    let mut text = "# Ops\n\nEvery op of a graph: its formula, operands and attributes as they stand in JSON (see [run.md](run.md)), its gradient, and the methods of Python's \
                    `Graph` that make it ([python.md](python.md)). This page is written by `cargo run -p verdigris-graph --example ops` from the table in \
                    `crates/verdigris-graph/src/ops`; a test holds it against the table.\n"
        .to_owned();
    for spec in SPECS {
        let _ = write!(text, "\n## {}\n\n{}\n", spec.name, spec.summary);
        for form in spec.forms {
            if !form.name.is_empty() {
                let _ = write!(text, "\n### {}\n", form.name);
            }
            let _ = write!(text, "\n```text\n{}\n```\n\n| operand | | holds |\n|---|---|---|\n", form.formula);
            for OperandSpec { name, role, presence, holds } in form.operands {
                let role = match role {
                    Some(Role::Input) => "read",
                    Some(Role::Output) => "written",
                    None => "read or written",
                };
                let presence = match presence {
                    Presence::Required => "",
                    Presence::Optional => ", optional",
                    Presence::Several => ", a list",
                };
                let _ = writeln!(text, "| `{name}` | {role}{presence} | {holds} |");
            }
            if !form.attributes.is_empty() {
                text += "\n| attribute | values | left out | check |\n|---|---|---|---|\n";
            }
            for AttributeSpec { name, kind, default, check, .. } in form.attributes {
                let default = default.map_or_else(String::new, |default| format!("`{default}`"));
                let _ = writeln!(text, "| `{name}` | {kind} | {default} | {check} |");
            }
            let _ = write!(text, "\n- **Dims**: {}.\n- **Gradient**: {}.\n", form.shape, form.gradient);
            for method in form.methods {
                let _ = writeln!(text, "- **Python**: `{}({}) -> {}`", method.name, method.parameters().join(", "), method.returns);
            }
        }
    }
    text
}
