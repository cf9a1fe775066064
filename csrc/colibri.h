/* colibri.h: the only header that Python sees. */
#ifndef COLIBRI_H
#define COLIBRI_H
/* cffi: begin */
const char *colibri_version(void);
/* cffi: end */
#endif
