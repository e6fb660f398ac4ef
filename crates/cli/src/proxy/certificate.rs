//! The dates of a certificate. rustls checks those of other certificates, but not those of the listener's own.

use std::time::{SystemTime, UNIX_EPOCH};

use oncegate_core::Timestamp;
use oncegate_http::ClientCertificate;

use crate::admin::{days_to, time};

/// The log warns about a certificate that ends within this time, or within a quarter of its validity. Its renewal is late
/// then, because it is usually due when a third is left, and there is still time to find out why.
const ENDS_SOON: i64 = 14 * DAY;
const DAY: i64 = 24 * 3600;

/// The dates in a certificate, in seconds since 1970. Both are included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Validity {
    pub(crate) not_before: i64,
    pub(crate) not_after: i64,
}

impl Validity {
    /// Reads the dates in a certificate (RFC 5280, 4.1). `None` if it is not a certificate.
    pub(crate) fn of(certificate: &[u8]) -> Option<Self> {
        let mut signed = after_issuer(certificate)?;
        let mut validity = element(&mut signed, SEQUENCE)?;
        Some(Self { not_before: date(&mut validity)?, not_after: date(&mut validity)? })
    }

    /// Reads the dates of a list of revoked certificates (RFC 5280, 5.1): its own, and that of the next one.
    pub(crate) fn of_list(mut list: &[u8]) -> Option<Self> {
        let mut list = element(&mut list, SEQUENCE)?;
        let mut signed = element(&mut list, SEQUENCE)?;
        if signed.first() == Some(&INTEGER) {
            element(&mut signed, INTEGER)?; // version
        }
        element(&mut signed, SEQUENCE)?; // algorithm of the signature
        element(&mut signed, SEQUENCE)?; // issuer
        Some(Self { not_before: date(&mut signed)?, not_after: date(&mut signed)? })
    }

    /// The warning about a list of revoked certificates with these dates. It is late if a quarter of its time is left.
    pub(crate) fn warning_of_lists(&self, now: i64) -> Option<String> {
        let end = shown(self.not_after);
        if now >= self.not_after {
            return Some(format!("expired at {end}: the clients of its authority are refused"));
        }
        let left = self.not_after - now;
        let is_late = left < ENDS_SOON.min(self.not_after.saturating_sub(self.not_before) / 4);
        is_late.then(|| {
            format!(
                "ends at {end}: from then on the clients of its authority are refused; fetch the next one"
            )
        })
    }

    /// Returns true if clients accept the certificate at this time.
    pub(crate) const fn includes(&self, now: i64) -> bool {
        self.not_before <= now && now <= self.not_after
    }

    /// The warning about the certificate at this time.
    pub(crate) fn warning(&self, now: i64) -> Option<String> {
        if now < self.not_before {
            let from = shown(self.not_before);
            return Some(format!("is not valid before {from}: clients refuse it (or the clock is wrong)"));
        }
        if now > self.not_after {
            return Some(format!("expired at {}: clients refuse it", shown(self.not_after)));
        }
        let left = self.not_after - now;
        let ends_soon = ENDS_SOON.min(self.not_after.saturating_sub(self.not_before) / 4);
        (left < ends_soon).then(|| {
            let within = match left / DAY {
                0 => "a day".to_owned(),
                days => format!("{} days", days + 1),
            };
            format!("ends at {}, in less than {within}: renew it", shown(self.not_after))
        })
    }
}

/// The signed fields of a certificate after its issuer: validity, subject, public key, extensions (RFC 5280, 4.1).
fn after_issuer(mut certificate: &[u8]) -> Option<&[u8]> {
    let mut certificate = element(&mut certificate, SEQUENCE)?;
    let mut signed = element(&mut certificate, SEQUENCE)?;
    if signed.first() == Some(&VERSION) {
        element(&mut signed, VERSION)?;
    }
    element(&mut signed, INTEGER)?; // serial number
    element(&mut signed, SEQUENCE)?; // algorithm of the signature
    element(&mut signed, SEQUENCE)?; // issuer
    Some(signed)
}

/// The subject and the alternative names of a certificate that TLS has verified (RFC 5280, 4.1 and 4.2.1.6), encoded. The
/// alternative names are sorted, because their order has no meaning. `None` if it is not a certificate.
pub(crate) fn names(certificate: &[u8]) -> Option<ClientCertificate> {
    let mut signed = after_issuer(certificate)?;
    element(&mut signed, SEQUENCE)?; // validity
    let subject = element(&mut signed, SEQUENCE)?;
    element(&mut signed, SEQUENCE)?; // public key
    let mut names: Vec<&[u8]> = Vec::new();
    while let Some(tag) = signed.first().copied() {
        let mut content = element(&mut signed, tag)?;
        if tag != EXTENSIONS {
            continue;
        }
        let mut extensions = element(&mut content, SEQUENCE)?;
        while !extensions.is_empty() {
            let mut extension = element(&mut extensions, SEQUENCE)?;
            if element(&mut extension, OBJECT_IDENTIFIER)? != SUBJECT_ALTERNATIVE_NAME {
                continue;
            }
            if extension.first() == Some(&BOOLEAN) {
                element(&mut extension, BOOLEAN)?;
            }
            let mut value = element(&mut extension, BYTE_STRING)?;
            let mut all = element(&mut value, SEQUENCE)?;
            while let Some(tag) = all.first().copied() {
                let before = all;
                element(&mut all, tag)?;
                names.push(before.get(..before.len() - all.len())?);
            }
        }
    }
    names.sort_unstable();
    names.dedup();
    Some(ClientCertificate::new(subject, &names.concat()))
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

pub(crate) fn shown(seconds: i64) -> String {
    time(Timestamp::from_millis(u64::try_from(seconds).unwrap_or_default().saturating_mul(1000)))
}

// Tags of DER (X.690).
const BOOLEAN: u8 = 0x01;
const INTEGER: u8 = 0x02;
const BYTE_STRING: u8 = 0x04;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// `[0]`, which is absent in version 1.
const VERSION: u8 = 0xa0;
/// `[3]`.
const EXTENSIONS: u8 = 0xa3;
/// 2.5.29.17.
const SUBJECT_ALTERNATIVE_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// Takes the next element, which must have this tag, off the input. Returns its content.
fn element<'a>(input: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    let (&[found, length], rest) = input.split_first_chunk()?;
    if found != tag {
        return None;
    }
    let (length, rest) = match usize::from(length) {
        short @ 0..=0x7f => (short, rest),
        // A length of more than four bytes is longer than any file.
        long @ 0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(long - 0x80)?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    *input = rest;
    Some(content)
}

/// Takes a date off the input (RFC 5280, 4.1.2.5): `YYMMDDHHMMSSZ` up to 2049, and `YYYYMMDDHHMMSSZ` from then on.
fn date(input: &mut &[u8]) -> Option<i64> {
    let tag = *input.first()?;
    let text = element(input, tag)?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year = number(year)?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (number(year)?, rest)
        }
        _ => return None,
    };
    let &[m1, m2, d1, d2, h1, h2, i1, i2, s1, s2, b'Z'] = rest else { return None };
    let [month, day, hour, minute, second] =
        [[m1, m2], [d1, d2], [h1, h2], [i1, i2], [s1, s2]].map(|two| number(&two));
    let (month, day, hour, minute, second) = (month?, day?, hour?, minute?, second?);
    let is_date = (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_date || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    Some(days_to(year, month, day) * DAY + hour * 3600 + minute * 60 + second)
}

fn number(digits: &[u8]) -> Option<i64> {
    digits
        .iter()
        .try_fold(0, |number, digit| digit.is_ascii_digit().then(|| number * 10 + i64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use oncegate_http::CertificateName;

    use super::*;

    fn certificate(from: (i32, u8, u8), to: (i32, u8, u8)) -> Vec<u8> {
        let mut certificate = rcgen::CertificateParams::new(["a.test".to_owned()]).unwrap();
        certificate.not_before = rcgen::date_time_ymd(from.0, from.1, from.2);
        certificate.not_after = rcgen::date_time_ymd(to.0, to.1, to.2);
        certificate.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn the_dates_are_read() {
        for (from, to, not_before, not_after) in [
            ((1970, 1, 1), (2000, 2, 29), 0, 951_782_400),
            ((2024, 2, 29), (2049, 12, 31), 1_709_164_800, 2_524_521_600),
            ((2026, 11, 22), (4096, 3, 1), 1_795_305_600, 67_095_302_400),
        ] {
            let validity = Validity::of(&certificate(from, to)).unwrap();
            assert_eq!(validity, Validity { not_before, not_after }, "{from:?} {to:?}");
        }
    }

    #[test]
    fn an_invalid_certificate_has_no_dates() {
        let whole = certificate((2024, 1, 1), (2025, 1, 1));
        // The dates are in the first part of it.
        for length in 0..90 {
            assert_eq!(Validity::of(&whole[..length]), None, "{length}");
        }
        for place in 0..whole.len() {
            let mut other = whole.clone();
            other[place] ^= 0xff;
            let _either = Validity::of(&other);
        }
        assert_eq!(Validity::of(&[SEQUENCE, 0x85, 0xff, 0xff, 0xff, 0xff, 0xff]), None);
    }

    #[test]
    fn the_dates_of_a_list_of_revoked_certificates_are_read() {
        let mut authority = rcgen::CertificateParams::new([]).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer =
            rcgen::CertifiedIssuer::self_signed(authority, rcgen::KeyPair::generate().unwrap()).unwrap();
        let list = rcgen::CertificateRevocationListParams {
            this_update: rcgen::date_time_ymd(1970, 4, 11),
            next_update: rcgen::date_time_ymd(1970, 4, 19),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let whole = list.signed_by(&issuer).unwrap().der().to_vec();
        let dates = Validity::of_list(&whole).unwrap();
        assert_eq!(dates, Validity { not_before: 100 * DAY, not_after: 108 * DAY });
        for place in 0..whole.len() {
            let mut other = whole.clone();
            other[place] ^= 0xff;
            let _either = Validity::of_list(&other);
            let _part = Validity::of_list(&whole[..place]);
        }
        assert_eq!(dates.warning_of_lists(106 * DAY), None);
        assert!(dates.warning_of_lists(106 * DAY + 1).unwrap().starts_with("ends at 1970-04-19T00:00:00"));
        assert!(dates.warning_of_lists(108 * DAY).unwrap().starts_with("expired at 1970-04-19T00:00:00"));
    }

    #[test]
    fn the_names_are_read_in_any_order() {
        let of = |names: &[&str], subject: &str| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            let mut certificate = rcgen::CertificateParams::new(names).unwrap();
            certificate.distinguished_name = rcgen::DistinguishedName::new();
            if !subject.is_empty() {
                certificate.distinguished_name.push(rcgen::DnType::CommonName, subject);
            }
            let whole = certificate.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec();
            let names = names_of(&whole);
            (
                names.name(CertificateName::Subject).to_vec(),
                names.name(CertificateName::AlternativeNames).to_vec(),
            )
        };
        let (subject, names) = of(&["a.test", "10.0.0.1"], "ada");
        assert_eq!(
            of(&["10.0.0.1", "a.test"], "ada"),
            (subject.clone(), names.clone()),
            "another key and order"
        );
        assert!(
            String::from_utf8_lossy(&subject).contains("ada")
                && String::from_utf8_lossy(&names).contains("a.test")
        );
        assert_ne!(of(&["a.test"], "eve").0, subject);
        assert_ne!(of(&["a.test"], "ada").1, names);
        assert_eq!(of(&[], ""), (Vec::new(), Vec::new()));
        let whole = certificate((2024, 1, 1), (2025, 1, 1));
        for place in 0..whole.len() {
            let mut other = whole.clone();
            other[place] ^= 0xff;
            let _either = super::names(&other);
            let _part = super::names(&whole[..place]);
        }
    }

    fn names_of(certificate: &[u8]) -> ClientCertificate {
        super::names(certificate).unwrap()
    }

    #[test]
    fn there_is_a_warning_before_and_after_the_validity_and_near_its_end() {
        let validity = Validity { not_before: 100 * DAY, not_after: 200 * DAY };
        let warning = |now| validity.warning(now).unwrap_or_default();
        assert!(
            warning(100 * DAY - 1).starts_with("is not valid before 1970-04-11T00:00:00"),
            "{}",
            warning(0)
        );
        assert_eq!((warning(100 * DAY), warning(186 * DAY)), (String::new(), String::new()));
        assert!(warning(186 * DAY + 1).ends_with("in less than 14 days: renew it"));
        assert!(warning(200 * DAY).ends_with("in less than a day: renew it"));
        assert!(warning(200 * DAY + 1).starts_with("expired at 1970-07-20T00:00:00"));
        let short = Validity { not_before: 0, not_after: 4 * DAY };
        assert_eq!(short.warning(3 * DAY), None);
        assert!(short.warning(3 * DAY + 1).unwrap().ends_with("in less than a day: renew it"));
        assert!(validity.includes(200 * DAY) && !validity.includes(200 * DAY + 1));
    }
}
