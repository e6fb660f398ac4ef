//! The way to make a key of the format that a route demands.

use oncegate_http::KeyGrammar;

/// The way to make a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyRecipe {
    /// A random UUID.
    Uuid,
    /// 26 digits, as a ULID.
    Ulid,
    /// This number of random hexadecimal digits.
    Hex(usize),
    /// The format is a pattern, and none of the others fits it.
    Own,
    /// The key is built from the body.
    None,
}

impl KeyRecipe {
    const CANDIDATES: [Self; 6] =
        [Self::Uuid, Self::Ulid, Self::Hex(32), Self::Hex(24), Self::Hex(20), Self::Hex(16)];

    /// The first recipe whose keys this grammar accepts.
    pub(super) fn of(grammar: &KeyGrammar) -> Self {
        let fits = |recipe: &Self| {
            recipe.samples().iter().all(|sample| grammar.key_of(sample.as_str().into()).is_ok())
        };
        Self::CANDIDATES.into_iter().find(fits).unwrap_or(Self::Own)
    }

    /// Keys with many different digits.
    fn samples(self) -> Vec<String> {
        let digits = [
            "0000000000000000", "ffffffffffffffff", "0123456789abcdef", "fedcba9876543210",
            "a1b2c3d4e5f60718",
        ];
        let twice = digits.map(|digits| digits.repeat(2));
        twice
            .iter()
            .filter_map(|hex| {
                let part = |from: usize, to: usize| hex.get(from..to);
                Some(match self {
                    Self::Uuid => format!(
                        "{}-{}-4{}-a{}-{}",
                        part(0, 8)?,
                        part(8, 12)?,
                        part(13, 16)?,
                        part(17, 20)?,
                        part(20, 32)?
                    ),
                    Self::Ulid => format!("0{}", part(0, 25)?.to_ascii_uppercase()),
                    Self::Hex(count) => part(0, count)?.to_owned(),
                    Self::Own | Self::None => return None,
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use oncegate_http::KeyFormat;

    use super::*;

    #[test]
    fn a_recipe_makes_keys_of_the_format() {
        let pattern = |text| KeyFormat::pattern(text).unwrap();
        for (format, expected) in [
            (KeyFormat::Any, KeyRecipe::Uuid),
            (KeyFormat::Uuid, KeyRecipe::Uuid),
            (KeyFormat::Ulid, KeyRecipe::Ulid),
            (pattern(".{1,64}"), KeyRecipe::Uuid),
            (pattern("[0-9A-Z]{26}"), KeyRecipe::Ulid),
            (pattern("[0-9a-f]{32}"), KeyRecipe::Hex(32)),
            (pattern("[a-z0-9]{1,20}"), KeyRecipe::Hex(20)),
            (pattern("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"), KeyRecipe::Uuid),
            (pattern("order-[0-9]{8}"), KeyRecipe::Own),
        ] {
            assert_eq!(
                KeyRecipe::of(&KeyGrammar::default().with_format(format.clone())),
                expected,
                "{format:?}"
            );
        }
    }
}
