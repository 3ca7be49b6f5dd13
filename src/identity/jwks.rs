//! The public keys of an issuer (JWK Set, RFC 7517), each bound to the one algorithm that it is for.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
};
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};

/// Bits of an RSA modulus. RFC 7518 §3.3 asks for 2048 at least; beyond 8192 a check costs too much.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// Keys that tokens may be signed with.
#[derive(Debug, Default)]
pub struct KeySet(Vec<Key>);

/// A key and what it is for.
#[derive(Debug)]
pub(super) struct Key {
    id: Option<Box<str>>,
    /// Fixed by the kind of key. Never the token's choice: a public key must not become the secret of an HMAC.
    pub(super) algorithm: Algorithm,
    pub(super) decoding_key: DecodingKey,
}

/// Why a file is no set of keys.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum KeySetError {
    #[error("it is no JSON Web Key Set: {0}")]
    Json(#[from] serde_json::Error),
    #[error("keys[{0}] is symmetric (`oct`): whoever can check tokens with it can make them")]
    Symmetric(usize),
    #[error("keys[{0}] has {1} bits: an RSA key needs 2048 to 8192")]
    KeySize(usize, usize),
    #[error("keys[{0}] is malformed")]
    Malformed(usize),
    #[error("two keys have the `kid` \"{0}\"")]
    DuplicateKid(Box<str>),
    #[error("it has no key for RS256 (RSA), ES256 (EC, P-256) or EdDSA (OKP, Ed25519)")]
    Empty,
}

impl KeySet {
    /// Reads a JWK Set. Keys for other uses and other algorithms are passed over (RFC 7517 §5).
    ///
    /// # Errors
    /// It is no JWK Set, a key in it cannot be right, or none is left.
    pub fn parse(json: &[u8]) -> Result<Self, KeySetError> {
        let set: JwkSet = serde_json::from_slice(json)?;
        let mut keys: Vec<Key> = Vec::new();
        for (index, jwk) in set.keys.iter().enumerate() {
            let Some(key) = Key::from_jwk(index, jwk)? else { continue };
            if let Some(id) = key.id.clone().filter(|id| keys.iter().any(|other| other.id.as_ref() == Some(id))) {
                return Err(KeySetError::DuplicateKid(id));
            }
            keys.push(key);
        }
        if keys.is_empty() { Err(KeySetError::Empty) } else { Ok(KeySet(keys)) }
    }

    /// The key that a token names; without a name, the only one for its algorithm.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Option<&Key> {
        if id.is_some() {
            return self.0.iter().find(|key| key.id.as_deref() == id);
        }
        let mut fitting = self.0.iter().filter(|key| key.algorithm == algorithm);
        fitting.next().filter(|_| fitting.next().is_none())
    }
}

impl Key {
    /// A key; none if it is not for what we do.
    fn from_jwk(index: usize, jwk: &Jwk) -> Result<Option<Self>, KeySetError> {
        let algorithm = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => Algorithm::RS256,
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => Algorithm::ES256,
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => Algorithm::EdDSA,
            AlgorithmParameters::OctetKey(_) => return Err(KeySetError::Symmetric(index)),
            _ => return Ok(None),
        };
        let common = &jwk.common;
        let signs = common.public_key_use.as_ref().is_none_or(|usage| *usage == PublicKeyUse::Signature)
            && common.key_operations.as_ref().is_none_or(|operations| operations.contains(&KeyOperations::Verify))
            && common.key_algorithm.is_none_or(|named| named == KeyAlgorithm::from(algorithm));
        if !signs {
            return Ok(None);
        }
        let decoding = DecodingKey::from_jwk(jwk).map_err(|_| KeySetError::Malformed(index))?;
        let malformed = |_| KeySetError::Malformed(index);
        // The library looks at a key when the first token comes: a broken one is found now.
        match decoding.kind() {
            DecodingKeyKind::RsaModulusExponent { n, e } => {
                let bits = n.len() * 8 - n.first().map_or(0, |first| first.leading_zeros() as usize);
                if !RSA_BITS.contains(&bits) {
                    return Err(KeySetError::KeySize(index, bits));
                }
                RsaPublicKeyComponents { n, e }.to_parsed_public_key(&RSA_PKCS1_2048_8192_SHA256).map_err(malformed)?
            }
            DecodingKeyKind::SecretOrDer(point) if algorithm == Algorithm::ES256 => {
                ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).map_err(malformed)?
            }
            DecodingKeyKind::SecretOrDer(point) => ParsedPublicKey::new(&ED25519, point).map_err(malformed)?,
        };
        Ok(Some(Key { id: common.key_id.as_deref().map(Box::from), algorithm, decoding_key: decoding }))
    }
}
