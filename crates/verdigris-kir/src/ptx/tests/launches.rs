//! Launches that the upper layer adds to programs, accepted by the assembler without a remark.

use super::assembler;
use crate::ir::{Access, MapDecl, MapType, Swizzle};
use crate::program::{Address, Fill, L2Promotion, MapSpec, Program};
use crate::ptx::{Isa, print};
use crate::tile::table;
use crate::verify::verify;

#[test]
fn launches_that_write_tables_assemble_without_spills() {
    let ptxas = match assembler::find() {
        Ok(ptxas) => ptxas,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let decl = MapDecl { ty: MapType::U32, rank: 2, box_dims: vec![4, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read };
    let spec = MapSpec {
        decl: decl.clone(),
        dims: vec![8, 8],
        strides_bytes: vec![32],
        element_strides: vec![1, 1],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Fill::Zero,
        l2: L2Promotion::B128,
    };
    let mut program = Program::default();
    table::add_addresses(&mut program, "addresses", &[Address::buffer(0)]);
    table::add_tensor_maps(&mut program, "maps", &decl, &[(Address::buffer(0), spec)]);
    for launch in program.launches() {
        let body = launch.kernel.build();
        launch.check(&body).expect("arguments fit");
        let verified = verify(body).expect("kernels are free of faults");
        let words =
            assembler::assemble(&ptxas, verified.target.ptx(), &print(&verified, Isa::V9_0)).unwrap_or_else(|words| panic!("{words}"));
        assert!(!words.contains("warning") && words.contains(" 0 bytes spill stores"), "{words}");
    }
}
