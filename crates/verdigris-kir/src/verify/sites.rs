//! Where each instruction stands: the tree of blocks, flat, with the way from each block to the top.

use crate::ir::{Block, Inst, KernelBody, Loc, Reg, Role, Stmt};

/// How a block hangs in the one around it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind<'a> {
    /// The kernel's own block.
    Top,
    /// Run where the condition holds.
    Then(Reg),
    /// Run where it does not hold.
    Otherwise(Reg),
    /// A loop's head.
    Head(Reg),
    /// A loop's body.
    Body(Reg),
    /// A role's body.
    Role(&'a Role),
}

/// A block with its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) parent: Option<usize>,
    pub(super) kind: Kind<'a>,
    /// The statement that holds the block.
    pub(super) loc: Loc,
}

/// An instruction with its block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site<'a> {
    pub(super) inst: &'a Inst,
    pub(super) block: usize,
}

/// All instructions in program order, and all blocks.
pub(super) struct Sites<'a> {
    pub(super) blocks: Vec<Place<'a>>,
    pub(super) sites: Vec<Site<'a>>,
    warps: u32,
}

impl<'a> Sites<'a> {
    pub(super) fn new(body: &'a KernelBody) -> Self {
        let mut sites = Sites { blocks: Vec::new(), sites: Vec::new(), warps: body.threads / 32 };
        sites.walk(&body.body, None, Kind::Top, Loc(0));
        sites
    }

    fn walk(&mut self, block: &'a Block, parent: Option<usize>, kind: Kind<'a>, loc: Loc) {
        let here = self.blocks.len();
        self.blocks.push(Place { parent, kind, loc });
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.sites.push(Site { inst, block: here }),
                Stmt::If { cond, then, otherwise, loc } => {
                    self.walk(then, Some(here), Kind::Then(*cond), *loc);
                    self.walk(otherwise, Some(here), Kind::Otherwise(*cond), *loc);
                }
                Stmt::Loop { head, cond, body, loc, .. } => {
                    self.walk(head, Some(here), Kind::Head(*cond), *loc);
                    self.walk(body, Some(here), Kind::Body(*cond), *loc);
                }
                Stmt::Roles { roles, .. } => {
                    for role in roles {
                        self.walk(&role.body, Some(here), Kind::Role(role), role.loc);
                    }
                }
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }

    /// The blocks from `block` to the top.
    pub(super) fn chain(&self, block: usize) -> impl Iterator<Item = (usize, &Place<'a>)> {
        std::iter::successors(Some(block), |&at| self.blocks[at].parent).map(|at| (at, &self.blocks[at]))
    }

    /// The warps that may run a block: first and number, from the roles around it.
    pub(super) fn warps(&self, block: usize) -> (u32, u32) {
        for (_, place) in self.chain(block) {
            if let Kind::Role(role) = place.kind {
                return (role.first_warp, role.warps);
            }
        }
        (0, self.warps)
    }

    /// The innermost role around a block, as the index of its body.
    pub(super) fn role(&self, block: usize) -> Option<(usize, &'a Role)> {
        self.chain(block).find_map(|(at, place)| match place.kind {
            Kind::Role(role) => Some((at, role)),
            _ => None,
        })
    }

    /// True where a loop stands around the block.
    pub(super) fn in_loop(&self, block: usize) -> bool {
        self.chain(block).any(|(_, place)| matches!(place.kind, Kind::Head(_) | Kind::Body(_)))
    }
}
