//! `conv.halo` on the cases that are made for it, interpreted and held against the reference.

mod conv_corpus;

#[test]
fn its_cases_under_its_configs() {
    conv_corpus::cases_of("conv.halo", &["conv/halo"]);
}
