//! The proxies in front of the sidecar whose information about the origin of a request is passed on.

use std::net::IpAddr;

/// Addresses of proxies that are trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrustedProxies {
    /// This machine.
    Loopback,
    /// Networks that are not routed on the internet, and this machine.
    Private,
    /// Every address.
    Any,
    /// No address.
    None,
    /// A network: its first address, and the number of bits that its addresses share.
    Network(IpAddr, u32),
}

impl TrustedProxies {
    /// Returns true if this address is one of them.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        match *self {
            Self::Loopback => address.is_loopback(),
            Self::Private => address.is_loopback() || is_private(address),
            Self::Any => true,
            Self::None => false,
            Self::Network(first, bits) => match (first, address) {
                (IpAddr::V4(first), IpAddr::V4(address)) => {
                    same_bits(first.to_bits().into(), address.to_bits().into(), 32 - bits)
                }
                (IpAddr::V6(first), IpAddr::V6(address)) => {
                    same_bits(first.to_bits(), address.to_bits(), 128 - bits)
                }
                _ => false,
            },
        }
    }
}

/// Returns true if two numbers are equal except for these lowest bits.
fn same_bits(a: u128, b: u128, lowest: u32) -> bool {
    (a ^ b).checked_shr(lowest).unwrap_or(0) == 0
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_private() || address.is_link_local(),
        IpAddr::V6(address) => address.is_unique_local() || address.is_unicast_link_local(),
    }
}

/// Reads `loopback`, `private`, `any`, `none`, an address, or a network such as `10.0.0.0/8`.
pub(crate) fn trusted_proxies(text: &str) -> Result<TrustedProxies, String> {
    match text {
        "loopback" => return Ok(TrustedProxies::Loopback),
        "private" => return Ok(TrustedProxies::Private),
        "any" => return Ok(TrustedProxies::Any),
        "none" => return Ok(TrustedProxies::None),
        _ => {}
    }
    let wrong = |why: &str| {
        format!(
            "{text:?} {why}; write loopback, private, any, none, an address or a network such as 10.0.0.0/8"
        )
    };
    let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
    let address: IpAddr = address.parse().map_err(|_| wrong("is not an address"))?;
    let address = address.to_canonical();
    let all = if address.is_ipv4() { 32 } else { 128 };
    let bits = match bits.map(str::parse) {
        None => all,
        Some(Ok(bits)) if bits <= all => bits,
        Some(_) => return Err(wrong(&format!("is not a network of 0 to {all} bits"))),
    };
    Ok(TrustedProxies::Network(address, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_addresses() {
        for (trusted, address, expected) in [
            ("loopback", "127.0.0.1", true),
            ("loopback", "127.9.9.9", true),
            ("loopback", "::1", true),
            ("loopback", "::ffff:127.0.0.1", true),
            ("loopback", "10.0.0.1", false),
            ("private", "10.0.0.1", true),
            ("private", "172.16.0.1", true),
            ("private", "172.32.0.1", false),
            ("private", "192.168.1.1", true),
            ("private", "127.0.0.1", true),
            ("private", "fd00::1", true),
            ("private", "fe80::1", true),
            ("private", "2001:db8::1", false),
            ("private", "203.0.113.1", false),
            ("any", "203.0.113.1", true),
            ("none", "127.0.0.1", false),
            ("203.0.113.1", "203.0.113.1", true),
            ("203.0.113.1", "::ffff:203.0.113.1", true),
            ("203.0.113.1", "203.0.113.2", false),
            ("203.0.113.0/24", "203.0.113.255", true),
            ("203.0.113.0/24", "203.0.114.0", false),
            ("0.0.0.0/0", "203.0.114.0", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::/0", "2001:db9::1", true),
        ] {
            let proxies = trusted_proxies(trusted).unwrap();
            assert_eq!(proxies.contains(address.parse().unwrap()), expected, "{trusted} {address}");
        }
    }

    #[test]
    fn an_invalid_address_is_named() {
        for text in
            ["", "localhost", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/", "::/129", "10.0.0", "10.0.0.1:80"]
        {
            let error = trusted_proxies(text).unwrap_err();
            assert!(error.starts_with(&format!("{text:?} is not")), "{error}");
        }
    }
}
